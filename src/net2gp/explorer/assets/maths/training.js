// Parameters of finite networks by optimization and by a Markov chain. The log joint density is
// −Σ (f(x) − y)²/(2 noise) − prior ‖θ‖²/2 over the parameters θ, whose prior is standard normal.

// The negative log joint of θ, with its gradient
function negativeLogJoint(network, xs, y, noise, prior) {
  return (theta) => {
    unflatten(network, theta);
    const pass = forward(network, xs), residual = pass.outputs.map((f, n) => f - y[n]);
    const gradient = flatten(backward(network, pass, residual.map((r) => r / noise)));
    for (let i = 0; i < theta.length; i++) gradient[i] += prior * theta[i];
    const value = dot(residual, residual, y.length) / (2 * noise) + (prior * dot(theta, theta, theta.length)) / 2;
    return { value, gradient };
  };
}

// Adam with a rate that falls to zero as a cosine; pauses every few steps
function* minimize(potential, start, { steps, rate }) {
  const theta = start.slice(), m = new Float64Array(theta.length), v = new Float64Array(theta.length);
  for (let step = 1; step <= steps; step++) {
    const { gradient } = potential(theta), now = (rate * (1 + Math.cos((Math.PI * step) / steps))) / 2;
    for (let i = 0; i < theta.length; i++) {
      m[i] += 0.1 * (gradient[i] - m[i]);
      v[i] += 0.001 * (gradient[i] ** 2 - v[i]);
      theta[i] -= (now * m[i]) / (1 - 0.9 ** step) / (Math.sqrt(v[i] / (1 - 0.999 ** step)) + 1e-8);
    }
    if (step % 10 === 0) yield null;
  }
  return theta;
}

// Hamiltonian Monte Carlo with unit masses: `warmup` steps in which the step size is adapted to accept 80 %, then
// `draws` steps, each given to `keep`. Returns the share of draws that were accepted
function* hamiltonian(potential, start, normal, { warmup, draws, leaps }, keep) {
  let theta = start.slice(), here = potential(theta), size = 0.02, accepted = 0;
  for (let step = 0; step < warmup + draws; step++) {
    const momentum = Float64Array.from(theta, normal), moved = theta.slice();
    const length = size * (0.8 + 0.4 * normal.uniform()), energy = here.value + dot(momentum, momentum, momentum.length) / 2;
    let there = here;
    for (let leap = 0; leap < leaps; leap++) {
      for (let i = 0; i < moved.length; i++) {
        momentum[i] -= (length / 2) * there.gradient[i];
        moved[i] += length * momentum[i];
      }
      there = potential(moved);
      for (let i = 0; i < moved.length; i++) momentum[i] -= (length / 2) * there.gradient[i];
    }
    const chance = Math.exp(Math.min(energy - there.value - dot(momentum, momentum, momentum.length) / 2, 0)) || 0;
    if (normal.uniform() < chance) {
      theta = moved;
      here = there;
      if (step >= warmup) accepted += 1 / draws;
    }
    if (step < warmup) size *= Math.exp((chance - 0.8) / Math.sqrt(1 + step / 4));
    else keep(theta);
    if (step % 5 === 0) yield null;
  }
  return accepted;
}
