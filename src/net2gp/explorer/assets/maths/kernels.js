// The NNGP kernel K and the tangent kernel Θ of an infinitely wide network with one input. A network `net` is
// {depth, activation, weightVar, biasVar, norm, skip}: a first linear layer, then `depth` blocks of norm,
// activation and linear layer. A skip adds what enters a block to what leaves it, except at the readout.

const NORM_EPS = 1e-5;

const PAIR = new Float64Array(2);

// For each point, the variance that enters each block, and K(x, x) and Θ(x, x) at the output
function diagonals(net, points) {
  const { variance, prepare } = ACTIVATIONS[net.activation], size = points.length, w = net.weightVar, b = net.biasVar;
  const layers = [], prepared = [], out = new Float64Array(2);
  let k = Float64Array.from(points, (x) => w * x * x + b), t = k.slice();
  for (let l = 0; l < net.depth; l++) {
    layers.push(k);
    if (prepare) prepared.push(Array.from(k, (q) => prepare(net.norm ? q / (q + NORM_EPS) : q)));
    const nextK = new Float64Array(size), nextT = new Float64Array(size);
    const skips = net.skip && l < net.depth - 1;
    for (let i = 0; i < size; i++) {
      const scale = net.norm ? 1 / (k[i] + NORM_EPS) : 1;
      variance(k[i] * scale, out);
      const value = w * out[0] + b;
      nextK[i] = value + (skips ? k[i] : 0);
      nextT[i] = value + w * out[1] * t[i] * scale + (skips ? t[i] : 0);
    }
    k = nextK;
    t = nextT;
  }
  return { points, layers, prepared, nngp: k, ntk: t };
}

function pair(net, { dual, preparedDual }, one, i, two, j) {
  const w = net.weightVar, b = net.biasVar;
  let k = w * one.points[i] * two.points[j] + b, t = k;
  for (let l = 0; l < net.depth; l++) {
    let p = one.layers[l][i], q = two.layers[l][j], scale = 1;
    if (net.norm) {
      const left = p + NORM_EPS, right = q + NORM_EPS;
      scale = 1 / Math.sqrt(left * right);
      p /= left;
      q /= right;
    }
    if (preparedDual) preparedDual(k * scale, one.prepared[l][i], two.prepared[l][j], PAIR);
    else dual(k * scale, p, q, PAIR);
    const value = w * PAIR[0] + b, tangent = value + w * PAIR[1] * t * scale;
    const skips = net.skip && l < net.depth - 1;
    k = value + (skips ? k : 0);
    t = tangent + (skips ? t : 0);
  }
  PAIR[0] = k;
  PAIR[1] = t;
}

// {nngp, ntk} between all points of two sets of diagonals, row by row
function crossKernels(net, one, two) {
  const activation = ACTIVATIONS[net.activation], rows = one.points.length, columns = two.points.length;
  const nngp = new Float64Array(rows * columns), ntk = new Float64Array(rows * columns);
  for (let i = 0, at = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++, at++) {
      pair(net, activation, one, i, two, j);
      nngp[at] = PAIR[0];
      ntk[at] = PAIR[1];
    }
  }
  return { nngp, ntk };
}

// {nngp, ntk} of a set of points with itself, symmetric, with exact diagonals
function gramKernels(net, one) {
  const activation = ACTIVATIONS[net.activation], size = one.points.length;
  const nngp = new Float64Array(size * size), ntk = new Float64Array(size * size);
  for (let i = 0; i < size; i++) {
    nngp[i * size + i] = one.nngp[i];
    ntk[i * size + i] = one.ntk[i];
    for (let j = 0; j < i; j++) {
      pair(net, activation, one, i, one, j);
      nngp[i * size + j] = nngp[j * size + i] = PAIR[0];
      ntk[i * size + j] = ntk[j * size + i] = PAIR[1];
    }
  }
  return { nngp, ntk };
}

// exp(−(x − x')²/(2·lengthscale²)) times a variance
function rbfKernel(one, two, variance, lengthscale) {
  const result = new Float64Array(one.length * two.length);
  for (let i = 0, at = 0; i < one.length; i++) {
    for (let j = 0; j < two.length; j++, at++) {
      result[at] = variance * Math.exp(-0.5 * ((one[i] - two[j]) / lengthscale) ** 2);
    }
  }
  return result;
}
