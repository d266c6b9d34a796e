// Finite networks on the main plot: as drawn, with a Bayesian readout, or trained; and their distance to the limit.

const TRAINED = 4;

function makeFinite(explorer) {
  let wide = [], runs = [], trainState = null, timer = 0;

  const wideWorker = makeBackground((part) => {
    if (part) wide[part.index] = part;
    explorer.changed();
  });

  const trainWorker = makeBackground((part) => {
    if (part) (runs[part.index] ||= []).push(part);
    explorer.changed();
  });

  function ask(state, result) {
    if (state.width === Infinity) return;
    const common = { net: result.net, width: state.width, seed: state.seed, x: [...result.x], y: [...result.y] };
    if (state.mode !== "training") {
      const key = JSON.stringify([result.net, state.width, state.seed]);
      if (wide.key !== key) wide = Object.assign([], { key });
      wideWorker.ask({ kind: "wide", ...common, count: NUM_LINES, grid: [...GRID], noise: state.noise });
    } else if (result.x.length) {
      const job = { kind: "train", ...common, count: TRAINED, grid: [...GRID], rate: result.rate, last: LIMITS.steps[1] };
      const key = JSON.stringify(job);
      if (key === trainState) return;
      trainState = key;
      runs = [];
      clearTimeout(timer);
      timer = setTimeout(() => trainWorker.ask(job), 120);
    }
  }

  // Outputs after a number of steps, between the two snapshots around it; null before they are there
  function trainedAt(run, steps, what) {
    const after = run.findIndex((shot) => shot.step >= steps);
    if (after < 0) return null;
    const next = run[after], before = run[Math.max(after - 1, 0)];
    const share = next.step === before.step ? 1 : (steps - before.step) / (next.step - before.step);
    return next[what].map((v, i) => share * v + (1 - share) * before[what][i]);
  }

  function lines(state, result) {
    if (state.width === Infinity) return null;
    if (state.mode === "prior") return { lines: wide.filter(Boolean).map((one) => one.prior) };
    if (state.mode === "posterior") {
      const there = wide.filter(Boolean);
      return { lines: there.map((one) => one.mean), variances: there.map((one) => one.variance) };
    }
    if (!result.x.length) return { lines: [] };
    const there = runs.filter(Boolean).map((run) => ({ run, now: trainedAt(run, state.steps, "grid") })).filter(({ now }) => now);
    return { lines: there.map(({ now }) => now), starts: there.map(({ run }) => run[0]), count: runs.length };
  }

  return { ask, lines, progress: () => Math.min(...Array.from({ length: TRAINED }, (_, i) => (runs[i] || [{ step: 0 }]).at(-1).step)),
    get busy() { return wideWorker.busy || trainWorker.busy; } };
}

// Where the theory of infinite width takes a network that starts as `start`: f₀ + Θ(x, X) W (y − f₀(X))
function predictedPath(result, modes, time, start) {
  const { N } = modes, weights = times(flowWeights(modes, time), N, N, result.y.map((v, n) => v - start.data[n]));
  return start.grid.map((f, m) => f + dot(result.cross.ntk, weights, N, m * N));
}
