// Eight posteriors side by side, computed in the background whenever data or network stay for a moment.

const EIGHT_GRID = Array.from({ length: 97 }, (_, i) => X_RANGE[0] + ((X_RANGE[1] - X_RANGE[0]) * i) / 96);

const EIGHT = {
  nngp: ["Infinite network, Bayesian", "NNGP: exact inference over all weights."],
  flow: ["Infinite ensemble, trained", "Law of networks trained to the end, with ridge."],
  ntk: ["NTK as a Gaussian process", "Regression with the tangent kernel."],
  rbf: ["Squared exponential", "The usual kernel, chosen by the evidence."],
  last: ["Bayesian last layer", "One trained network of width 24, its readout uncertain."],
  laplace: ["Laplace", "The same network, linearized in all of its weights."],
  ensemble: ["Ensemble", "Six networks of width 24, trained from different starts."],
  chain: ["Hamiltonian Monte Carlo", "One chain of draws from the posterior of a network of width 8."],
};

function makeEight(explorer) {
  const holder = byId("eight"), found = new Map();
  for (const [name, [title, text]] of Object.entries(EIGHT)) {
    const figure = document.createElement("figure");
    figure.innerHTML = `<h3>${title}</h3><canvas id="eight-${name}" role="img" aria-label="${title}"></canvas><p id="eight-${name}-note">${text}</p>`;
    holder.append(figure);
  }
  let drawnFor = null;
  const draw = () => {
    const { state } = explorer;
    for (const [name, [title, text]] of Object.entries(EIGHT)) {
      const canvas = byId(`eight-${name}`), law = found.get(name);
      const f = frame(canvas, X_RANGE, Y_RANGE, { left: 4, right: 4, top: 4, bottom: 4 });
      axes(f, [-2, 0, 2], [-1, 0, 1], () => "");
      if (law) drawLaw(f, EIGHT_GRID, law, law.lines);
      dots(f, drawnFor || state.points, 3);
      byId(`eight-${name}-note`).textContent = law ? [text, law.note].filter(Boolean).join(" ") + (law.note ? "." : "") : "Computing …";
      const widest = law && Math.sqrt(Math.max(...law.variance));
      canvas.setAttribute("aria-label", law ? `${title}: the largest standard deviation is ${shortNumber(widest)}` : `${title}: computing`);
    }
  };
  const worker = makeBackground((law) => {
    if (law) found.set(law.name, law);
    draw();
  });
  const follow = (state, { net, x, y }) => {
    if (!x.length) {
      found.clear();
      drawnFor = [];
      return draw();
    }
    const job = { kind: "eight", net, x: [...x], y: [...y], noise: state.noise, seed: state.seed, grid: EIGHT_GRID };
    if (worker.ask(job)) {
      found.clear();
      drawnFor = state.points.map((point) => [...point]);
    }
    return draw();
  };
  draw();
  return { follow, found };
}
