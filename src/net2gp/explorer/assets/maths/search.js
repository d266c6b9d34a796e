// Hyperparameters by the evidence: weight, bias and noise variance within the ranges of the sliders.

const SEARCHED = { weightVar: [0.05, 6], biasVar: [1e-3, 2], noise: [1e-4, 1] };

function fromLogs(logs) {
  return Object.fromEntries(Object.entries(SEARCHED).map(([name, [low, high]], i) =>
    [name, Math.min(Math.max(Math.exp(logs[i]), low), high)]));
}

function bestVariances(net, x, y, start, evaluations) {
  const objective = (logs) => {
    const { noise, ...variances } = fromLogs(logs);
    return evidenceOf({ ...net, ...variances }, x, y, noise);
  };
  const logs = Object.keys(SEARCHED).map((name) => Math.log(Math.max(start[name], SEARCHED[name][0])));
  const found = maximize(objective, logs, 0.7, evaluations);
  return { ...fromLogs(found.x), evidence: found.value };
}

// The best variances of this network, or, if `all`, of every depth and activation
function* chooseJob({ net, noise, x, y, all, activations }) {
  const points = Float64Array.from(x), evaluations = all ? 80 : 160, depths = all ? [1, 2, 3, 4, 6, 8] : [net.depth];
  for (const activation of all ? activations : [net.activation]) {
    for (const depth of depths) {
      const candidate = { ...net, activation, depth };
      const found = bestVariances(candidate, points, y, { ...net, noise }, evaluations);
      yield { ...found, activation, depth };
    }
  }
}

// The evidence of networks of each depth, everything else as it is
function* depthsJob({ net, noise, x, y }) {
  const points = Float64Array.from(x);
  for (let depth = 1; depth <= 8; depth++) yield { depth, evidence: evidenceOf({ ...net, depth }, points, y, noise) };
}
