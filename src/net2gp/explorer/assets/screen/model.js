// All numbers of the main plot for a state. Kernels on the grid are kept until the network changes.

const GRID = Float64Array.from({ length: 161 }, (_, i) => X_RANGE[0] + ((X_RANGE[1] - X_RANGE[0]) * i) / 160);
const NUM_LINES = 6;

const KEPT = { net: "", grid: null, gram: null, seed: null, normals: null };

function gridKernels(net) {
  const key = JSON.stringify(net);
  if (KEPT.net !== key) Object.assign(KEPT, { net: key, grid: diagonals(net, GRID), gram: null });
  return KEPT.grid;
}

function gridGram(net) {
  const grid = gridKernels(net);
  if (!KEPT.gram) KEPT.gram = gramKernels(net, grid);
  return KEPT.gram;
}

function lineNormals(seed) {
  if (KEPT.seed !== seed) {
    const normal = makeNormals(seed);
    KEPT.seed = seed;
    KEPT.normals = Array.from({ length: NUM_LINES }, () => Float64Array.from(GRID, normal));
  }
  return KEPT.normals;
}

// A step of gradient descent, half as large as the largest that is stable, with two digits
function learningRate(gram) {
  const N = Math.sqrt(gram.ntk.length);
  let v = new Float64Array(N).fill(1), size = 1;
  for (let i = 0; i < 60; i++) {
    v = times(gram.ntk, N, N, v);
    size = Math.sqrt(dot(v, v, N));
    v = v.map((entry) => entry / size);
  }
  return Number((N / size).toPrecision(2));
}

// {mean, variance} on the grid, draws in `lines`, the evidence, and the kernels of the data
function compute(state) {
  const net = netOf(state), grid = gridKernels(net), N = state.points.length;
  const x = Float64Array.from(state.points, (p) => p[0]), y = Float64Array.from(state.points, (p) => p[1]);
  const data = diagonals(net, x), gram = gramKernels(net, data);
  const flat = { mean: new Float64Array(GRID.length), variance: grid.nngp, whitened: null, evidence: 0 };
  const cross = N ? crossKernels(net, grid, data) : null;
  const posterior = N ? regress(gram.nngp, cross.nngp, grid.nngp, y, state.noise) : flat;
  const result = { net, x, y, gram, cross, grid, evidence: posterior.evidence, rate: N ? learningRate(gram) : 1 };
  if (state.mode === "training" && N) {
    const modes = flowModes(gram, 0), law = flowLaw(gram, cross, grid.nngp, y, modes, state.steps * result.rate);
    return { ...result, ...law, modes, lines: [] };
  }
  const shown = state.mode === "posterior" ? posterior : flat;
  const exact = state.width === Infinity;
  const lines = exact ? drawFunctions(gridGram(net).nngp, shown.whitened, shown.mean, lineNormals(state.seed)) : [];
  return { ...result, mean: shown.mean, variance: shown.variance, lines };
}
