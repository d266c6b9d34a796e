// Finite networks in the parameterization in which widths have a limit: a layer computes
// √(σ_w²/fan-in) W h + σ_b β, and W and β start as independent standard normal numbers. Values at P points are
// rows of P × width arrays.

function makeNetwork(net, width, normal) {
  const Array_ = width > 256 ? Float32Array : Float64Array, W = [], b = [];
  for (let l = 0; l <= net.depth; l++) {
    const rows = l === net.depth ? 1 : width, columns = l === 0 ? 1 : width;
    const weights = new Array_(rows * columns), biases = new Float64Array(rows);
    for (let i = 0; i < weights.length; i++) weights[i] = normal();
    for (let i = 0; i < rows; i++) biases[i] = normal();
    W.push(weights);
    b.push(biases);
  }
  return { net, width, W, b };
}

function fanIn(network, l) {
  return l === 0 ? 1 : network.width;
}

// √(σ_w²/fan-in) W h + σ_b β at P points, four points at a time, since each weight is then read once for them
function linearLayer(network, l, h, P) {
  const W = network.W[l], b = network.b[l], rows = b.length, columns = fanIn(network, l);
  const scale = Math.sqrt(network.net.weightVar / columns), shift = Math.sqrt(network.net.biasVar);
  const out = new Float64Array(P * rows);
  for (let first = 0; first < P; first += 4) {
    const p0 = first * columns, p1 = Math.min(first + 1, P - 1) * columns;
    const p2 = Math.min(first + 2, P - 1) * columns, p3 = Math.min(first + 3, P - 1) * columns;
    for (let i = 0, at = 0; i < rows; i++) {
      let s0 = 0, s1 = 0, s2 = 0, s3 = 0;
      for (let j = 0; j < columns; j++, at++) {
        const w = W[at];
        s0 += w * h[p0 + j];
        s1 += w * h[p1 + j];
        s2 += w * h[p2 + j];
        s3 += w * h[p3 + j];
      }
      const sums = [s0, s1, s2, s3];
      for (let p = first; p < Math.min(first + 4, P); p++) out[p * rows + i] = scale * sums[p - first] + shift * b[i];
    }
  }
  return out;
}

// Each row less its mean, over √(variance + ε), as LayerNorm without its own parameters; and 1/√(variance + ε)
function normalize(u, width) {
  const P = u.length / width, out = new Float64Array(u.length), inverse = new Float64Array(P);
  for (let p = 0; p < P; p++) {
    let mean = 0, square = 0;
    for (let i = 0; i < width; i++) mean += u[p * width + i] / width;
    for (let i = 0; i < width; i++) square += (u[p * width + i] - mean) ** 2 / width;
    inverse[p] = 1 / Math.sqrt(square + NORM_EPS);
    for (let i = 0; i < width; i++) out[p * width + i] = (u[p * width + i] - mean) * inverse[p];
  }
  return { out, inverse };
}

// Outputs at P points, the features before the readout, and what a backward pass needs
function forward(network, xs) {
  const { net, width } = network, { apply } = ACTIVATIONS[net.activation], P = xs.length, tape = [];
  let u = linearLayer(network, 0, Float64Array.from(xs), P), h = null;
  for (let l = 0; l < net.depth; l++) {
    const norm = net.norm ? normalize(u, width) : null, v = norm ? norm.out : u;
    h = v.map(apply);
    tape.push({ v, h, inverse: norm && norm.inverse });
    const next = linearLayer(network, l + 1, h, P);
    if (net.skip && l < net.depth - 1) for (let i = 0; i < next.length; i++) next[i] += u[i];
    u = next;
  }
  return { outputs: u, features: h, tape, xs: Float64Array.from(xs) };
}

// Through the norm: (δ − mean δ − v · mean(δ v)) / √(variance + ε) in each row
function throughNorm(delta, { v, inverse }, width) {
  for (let p = 0; p < inverse.length; p++) {
    let mean = 0, along = 0;
    for (let i = p * width; i < (p + 1) * width; i++) {
      mean += delta[i] / width;
      along += (delta[i] * v[i]) / width;
    }
    for (let i = p * width; i < (p + 1) * width; i++) delta[i] = (delta[i] - mean - v[i] * along) * inverse[p];
  }
  return delta;
}

// What the inputs of layer l get from the deltas of its outputs, and its gradients, which are added to `grads`
function linearBackward(network, l, delta, h, grads, wantInputs) {
  const W = network.W[l], rows = network.b[l].length, columns = fanIn(network, l), P = delta.length / rows;
  const scale = Math.sqrt(network.net.weightVar / columns), shift = Math.sqrt(network.net.biasVar);
  const back = wantInputs ? new Float64Array(P * columns) : null, gW = grads.W[l], gb = grads.b[l];
  for (let i = 0; i < rows; i++) {
    for (let p = 0; p < P; p++) {
      const d = delta[p * rows + i];
      if (d === 0) continue;
      gb[i] += shift * d;
      const sd = scale * d, from = i * columns, at = p * columns;
      for (let j = 0; j < columns; j++) gW[from + j] += sd * h[at + j];
      if (back) for (let j = 0; j < columns; j++) back[at + j] += sd * W[from + j];
    }
  }
  return back;
}

const zerosLike = (network) => ({ W: network.W.map((w) => new Float64Array(w.length)), b: network.b.map((v) => new Float64Array(v.length)) });

// Gradients of Σ_p outputs[p] · weights[p] in all parameters
function backward(network, pass, weights) {
  const { net, width } = network, { slope } = ACTIVATIONS[net.activation], grads = zerosLike(network);
  let delta = Float64Array.from(weights);
  for (let l = net.depth - 1; l >= 0; l--) {
    const { v, h } = pass.tape[l], skips = net.skip && l < net.depth - 1;
    let back = linearBackward(network, l + 1, delta, h, grads, true);
    for (let i = 0; i < back.length; i++) back[i] *= slope(v[i]);
    if (net.norm) back = throughNorm(back, pass.tape[l], width);
    if (skips) for (let i = 0; i < back.length; i++) back[i] += delta[i];
    delta = back;
  }
  linearBackward(network, 0, delta, pass.xs, grads, false);
  return grads;
}

// One step of gradient descent on Σ (f(x) − y)²/(2N), and the loss before it
function descend(network, xs, y, rate) {
  const pass = forward(network, xs), N = y.length;
  const residual = pass.outputs.map((f, n) => f - y[n]);
  const grads = backward(network, pass, residual.map((r) => r / N));
  for (let l = 0; l < network.W.length; l++) {
    const W = network.W[l], b = network.b[l], gW = grads.W[l], gb = grads.b[l];
    for (let i = 0; i < W.length; i++) W[i] -= rate * gW[i];
    for (let i = 0; i < b.length; i++) b[i] -= rate * gb[i];
  }
  return dot(residual, residual, N) / (2 * N);
}

// The kernel of a network whose readout alone is random, given its features at two sets of points
function featureKernel(network, one, two) {
  const { width, net } = network, rows = one.length / width, columns = two.length / width;
  const result = new Float64Array(rows * columns), scale = net.weightVar / width;
  for (let i = 0, at = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++, at++) result[at] = scale * dot(one, two, width, i * width, j * width) + net.biasVar;
  }
  return result;
}

function rowSquares(network, features) {
  const { width, net } = network, scale = net.weightVar / width;
  return Float64Array.from({ length: features.length / width }, (_, i) =>
    scale * dot(features, features, width, i * width, i * width) + net.biasVar);
}

// All parameters in one vector, layer by layer, weights before biases
function flatten({ W, b }) {
  const parts = W.flatMap((w, l) => [w, b[l]]), flat = new Float64Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    flat.set(part, at);
    at += part.length;
  }
  return flat;
}

function unflatten(network, flat) {
  let at = 0;
  for (let l = 0; l < network.W.length; l++) {
    for (const part of [network.W[l], network.b[l]]) {
      part.set(flat.subarray(at, at + part.length));
      at += part.length;
    }
  }
}
