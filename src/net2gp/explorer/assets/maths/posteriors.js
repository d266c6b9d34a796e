// Eight posteriors of the same points. Each is a generator that ends with {mean, variance} of the function on a grid.

const SMALL = { network: 24, members: 6, chain: 8, steps: 500 };

function* exactPosteriors({ net, grid, x, y, noise }) {
  const data = diagonals(net, x), places = diagonals(net, grid);
  const gram = gramKernels(net, data), cross = crossKernels(net, places, data);
  yield { name: "nngp", ...regress(gram.nngp, cross.nngp, places.nngp, y, noise) };
  yield { name: "flow", ...flowLaw(gram, cross, places.nngp, y, flowModes(gram, noise), Infinity) };
  yield { name: "ntk", ...regress(gram.ntk, cross.ntk, places.ntk, y, noise) };
  const [variance, lengthscale] = bestRbf(x, y, noise);
  const rbf = regress(rbfKernel(x, x, variance, lengthscale), rbfKernel(grid, x, variance, lengthscale),
    new Float64Array(grid.length).fill(variance), y, noise);
  yield { name: "rbf", note: `Lengthscale ${lengthscale.toFixed(2)}, variance ${variance.toFixed(2)}`, variances: variance, lengthscale, ...rbf };
}

// Variance and lengthscale with the largest evidence, within 0.05 … 20 and 0.1 … 5
function bestRbf(x, y, noise) {
  const clamp = (logs) => [Math.min(Math.max(Math.exp(logs[0]), 0.05), 20), Math.min(Math.max(Math.exp(logs[1]), 0.1), 5)];
  const objective = (logs) => logEvidence(rbfKernel(x, x, ...clamp(logs)), y, noise);
  const starts = [0.3, 1, 2.5].map((l) => maximize(objective, [0, Math.log(l)], 0.5, 60));
  return clamp(starts.reduce((a, b) => (b.value > a.value ? b : a)).x);
}

// The most likely parameters of a network under the standard normal prior
function* mostLikely(network, { x, y, noise }, prior) {
  const theta = yield* minimize(negativeLogJoint(network, x, y, noise, prior), flatten(network), { steps: SMALL.steps, rate: 0.03 });
  unflatten(network, theta);
}

// J(x) at each point: the gradients of its output in all parameters, row by row
function jacobianRows(network, xs) {
  return Array.from(xs, (x) => {
    const pass = forward(network, [x]);
    return flatten(backward(network, pass, [1]));
  });
}

const products = (one, two) => Float64Array.from({ length: one.length * two.length }, (_, i) =>
  dot(one[Math.floor(i / two.length)], two[i % two.length], one[0].length));

function* aroundOneNetwork(job) {
  const { net, grid, x, y, noise, seed } = job, network = makeNetwork(net, SMALL.network, makeNormals(seed * 31 + 7));
  yield* mostLikely(network, job, 1);
  const places = forward(network, grid), atData = forward(network, x).features;
  yield { name: "last", ...regress(featureKernel(network, atData, atData), featureKernel(network, places.features, atData),
    rowSquares(network, places.features), y, noise) };
  const J = jacobianRows(network, grid), JX = jacobianRows(network, x);
  const prior = Float64Array.from(J, (row) => dot(row, row, row.length));
  const { variance } = regress(products(JX, JX), products(J, JX), prior, y, noise);
  yield { name: "laplace", mean: places.outputs, variance };
}

function meanAndVariance(functions) {
  const M = functions[0].length, mean = new Float64Array(M), variance = new Float64Array(M), S = functions.length;
  for (const f of functions) for (let m = 0; m < M; m++) mean[m] += f[m] / S;
  for (const f of functions) for (let m = 0; m < M; m++) variance[m] += (f[m] - mean[m]) ** 2 / (S - 1);
  return { mean, variance };
}

function* ensemble(job) {
  const outputs = [];
  for (let member = 0; member < SMALL.members; member++) {
    const network = makeNetwork(job.net, SMALL.network, makeNormals(job.seed * 131 + member));
    yield* mostLikely(network, job, 0);
    outputs.push(forward(network, job.grid).outputs);
  }
  yield { name: "ensemble", ...meanAndVariance(outputs), lines: outputs };
}

function* chain(job) {
  const { net, grid, x, y, noise, seed } = job, normal = makeNormals(seed * 17 + 3), outputs = [];
  const network = makeNetwork(net, SMALL.chain, normal), potential = negativeLogJoint(network, x, y, noise, 1);
  yield* mostLikely(network, job, 1);
  let count = 0;
  const keep = (theta) => {
    if (count++ % 4) return;
    unflatten(network, theta);
    outputs.push(forward(network, grid).outputs);
  };
  const rate = yield* hamiltonian(potential, flatten(network), normal, { warmup: 250, draws: 800, leaps: 16 }, keep);
  const lines = [0.2, 0.4, 0.6, 0.8].map((share) => outputs[Math.floor(share * outputs.length)]);
  yield { name: "chain", ...meanAndVariance(outputs), lines, note: `It accepts ${Math.round(100 * rate)} % of its steps` };
}

function* eightJob(job) {
  const typed = { ...job, x: Float64Array.from(job.x), grid: Float64Array.from(job.grid) };
  for (const part of [exactPosteriors, aroundOneNetwork, ensemble, chain]) yield* part(typed);
}
