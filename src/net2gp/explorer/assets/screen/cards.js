// What the cards below the plot compute in the background, and their buttons.

function makePlayer(explorer) {
  const { state } = explorer, button = byId("play");
  let playing = false, at = 0, last = 0;
  const show = () => {
    button.textContent = playing ? "❚❚" : "▶";
    button.setAttribute("aria-label", playing ? "Pause the training" : "Play the training");
  };
  const tick = (now) => {
    if (!playing) return;
    at = Math.min(at + (now - last) / 7000, 1);
    last = now;
    explorer.set({ steps: Math.max(1, Math.round(Math.exp(at * STEPS_LOG))) });
    playing = at < 1 && state.mode === "training";
    show();
    requestAnimationFrame(tick);
  };
  button.addEventListener("click", () => {
    playing = !playing;
    at = Math.log(state.steps) / STEPS_LOG;
    if (at >= 1) at = 0;
    show();
    requestAnimationFrame((now) => { last = now; tick(now); });
  });
  show();
}

function makeCharts(explorer) {
  const widths = new Map(), depths = new Map(), { state } = explorer;
  const drawLower = () => {
    drawWidths([...widths.values()], state.width);
    drawDepths(state, [...depths.values()]);
  };
  const widthsWorker = makeBackground((row) => {
    if (row) widths.set(row.width, row);
    drawLower();
  });
  const depthsWorker = makeBackground((row) => {
    if (row) depths.set(row.depth, row);
    drawLower();
  });
  drawLower();
  bindPhase(explorer);
  bindChoice(explorer);
  const follow = (now, { net, x, y }) => {
    const common = { net, x: [...x], y: [...y], noise: now.noise };
    const finite = WIDTHS.slice(0, -1);
    if (widthsWorker.ask({ kind: "widths", ...common, seed: now.seed, count: 12, widths: finite })) widths.clear();
    if (!x.length) depths.clear();
    else depthsWorker.ask({ kind: "depths", ...common });
    drawLower();
  };
  return follow;
}

function bindPhase(explorer) {
  const canvas = byId("phase"), { state } = explorer;
  const choose = (w, b) => {
    const clamp = (v, [low, high]) => Math.round(Math.min(Math.max(v, low), high) * 100) / 100;
    explorer.set({ weightVar: clamp(w, LIMITS.weightVar), biasVar: clamp(b, LIMITS.biasVar) });
  };
  const at = (event) => {
    const box = canvas.getBoundingClientRect(), f = phaseFrameOf(canvas);
    choose(f.fromX(event.clientX - box.left), f.fromY(event.clientY - box.top));
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    at(event);
  });
  canvas.addEventListener("pointermove", (event) => { if (event.buttons) at(event); });
  const STEPS = { ArrowLeft: [-0.05, 0], ArrowRight: [0.05, 0], ArrowUp: [0, 0.05], ArrowDown: [0, -0.05] };
  canvas.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    choose(state.weightVar + step[0], state.biasVar + step[1]);
    event.preventDefault();
  });
  byId("critical").addEventListener("click", () => {
    const weight = criticalWeight(state.activation, state.biasVar), bare = criticalWeight(state.activation, 0);
    if (weight <= LIMITS.weightVar[1]) explorer.glide({ weightVar: round(weight, 5) });
    else if (bare <= LIMITS.weightVar[1]) explorer.glide({ weightVar: round(bare, 5), biasVar: 0 });
  });
}

function bindChoice(explorer) {
  const { state } = explorer, note = byId("depths-note");
  let best = null, all = false;
  const worker = makeBackground((found, done) => {
    if (found && (!best || found.evidence > best.evidence)) best = found;
    if (found && all) note.textContent = `Trying ${ACTIVATIONS[found.activation].label} with ${found.depth} layers: ${found.evidence.toFixed(1)} …`;
    if (!done) return;
    delete note.dataset.busy;
    const { activation, depth, weightVar, biasVar, noise } = best;
    explorer.glide({ activation, depth, weightVar: round(weightVar), biasVar: round(biasVar), noise: round(noise) });
  });
  const ask = (everything) => {
    if (!state.points.length) return;
    best = null;
    all = everything;
    if (all) note.dataset.busy = "yes";
    const { net, x, y } = explorer.result, activations = Object.keys(ACTIVATIONS);
    worker.ask({ kind: "choose", net, noise: state.noise, x: [...x], y: [...y], all, activations, once: performance.now() });
  };
  byId("choose").addEventListener("click", () => ask(false));
  byId("choose-all").addEventListener("click", () => ask(true));
}
