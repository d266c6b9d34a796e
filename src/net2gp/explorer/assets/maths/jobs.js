// What runs in the background: networks of finite width. A job is a generator of partial results; between two of
// them a newer job of the same kind may take its place.

const DRAWN = { key: "", networks: [] };

// Networks for a seed, each with features on the grid and at points already seen
function drawnNetworks({ net, width, seed, count }) {
  const key = JSON.stringify([net, width, seed, count]);
  if (DRAWN.key !== key) {
    Object.assign(DRAWN, { key, networks: Array.from({ length: count }, (_, i) => ({ seed: seed * 1009 + i })) });
  }
  return DRAWN.networks;
}

function featuresAt(one, xs) {
  const missing = [...new Set(xs)].filter((x) => !one.seen.has(x)), { width } = one.network;
  if (one.seen.size > 500) one.seen.clear();
  const wanted = one.seen.size ? missing : [...new Set(xs)];
  if (wanted.length) {
    const { features } = forward(one.network, wanted);
    wanted.forEach((x, i) => one.seen.set(x, features.slice(i * width, (i + 1) * width)));
  }
  const result = new Float64Array(xs.length * width);
  xs.forEach((x, i) => result.set(one.seen.get(x), i * width));
  return result;
}

// Each network as drawn, and its posterior if its readout alone is Bayesian
function* wideJob(job) {
  const { net, width, grid, x, y, noise } = job;
  for (const [index, one] of drawnNetworks(job).entries()) {
    if (!one.network) {
      one.network = makeNetwork(net, width, makeNormals(one.seed));
      const pass = forward(one.network, grid);
      Object.assign(one, { seen: new Map(), prior: pass.outputs, features: pass.features });
      one.squares = rowSquares(one.network, one.features);
    }
    let law = { mean: one.prior, variance: null };
    if (x.length) {
      const features = featuresAt(one, x), gram = featureKernel(one.network, features, features);
      law = regress(gram, featureKernel(one.network, one.features, features), one.squares, y, noise);
    }
    yield { index, prior: one.prior, mean: law.mean, variance: law.variance };
  }
}

const rootMeanSquare = (a, b) => Math.sqrt(a.reduce((sum, v, i) => sum + (v - b[i]) ** 2 / a.length, 0));

function relativeGap(a, b) {
  return rootMeanSquare(a, b) / Math.sqrt(b.reduce((sum, v) => sum + (v * v) / b.length, 0));
}

// How far networks of each width are from the limit: their kernel, relative to its size, and their posterior mean,
// relative to the prior's standard deviation; averages over `count` networks
function* widthsJob({ net, seed, count, widths, x, y, noise }) {
  const places = Float64Array.from({ length: 25 }, (_, i) => -3 + i / 4), limit = diagonals(net, places);
  const data = diagonals(net, x), gram = gramKernels(net, limit).nngp, scale = Math.sqrt(Math.max(...limit.nngp));
  const law = x.length ? regress(gramKernels(net, data).nngp, crossKernels(net, limit, data).nngp, limit.nngp, y, noise) : null;
  for (const width of widths) {
    let kernel = 0, mean = 0;
    const networks = Math.max(3, Math.min(count, Math.ceil((count * 64) / width)));
    for (let i = 0; i < networks; i++) {
      const network = makeNetwork(net, width, makeNormals(seed * 7919 + width * 31 + i));
      const features = forward(network, [...places, ...x]).features;
      const one = features.subarray(0, places.length * width), two = features.subarray(places.length * width);
      kernel += relativeGap(featureKernel(network, one, one), gram) / networks;
      if (!law) continue;
      const found = regress(featureKernel(network, two, two), featureKernel(network, one, two), rowSquares(network, one), y, noise);
      mean += rootMeanSquare(found.mean, law.mean) / scale / networks;
    }
    yield { width, kernel, mean: law ? mean : NaN };
  }
}

// Steps at which a training is shown: all small ones, then about forty, evenly in the logarithm
function snapshotSteps(last) {
  const steps = new Set([0]);
  for (let at = 0; at <= 40; at++) steps.add(Math.round(Math.exp((Math.log(last) * at) / 40)));
  return [...steps].sort((a, b) => a - b);
}

// Networks trained by gradient descent, in turns: their outputs on the grid and at the data after some steps
function* trainJob({ net, width, seed, count, grid, x, y, rate, last }) {
  const networks = Array.from({ length: count }, (_, i) => makeNetwork(net, width, makeNormals(seed * 4001 + i)));
  let done = 0;
  for (const step of snapshotSteps(last)) {
    for (let index = 0; index < count; index++) {
      let loss = NaN;
      for (let s = done; s < step; s++) {
        loss = descend(networks[index], x, y, rate);
        if (s % 20 === 19) yield null;
      }
      yield { index, step, loss, grid: forward(networks[index], grid).outputs, data: forward(networks[index], x).outputs };
    }
    done = step;
  }
}

const JOBS = {
  wide: wideJob, widths: widthsJob, train: trainJob, choose: chooseJob, depths: depthsJob, eight: eightJob,
};
