// The page: one state, one loop. A change of the state asks for the next frame, which computes and draws.

const explorer = (() => {
  loadTables(JSON.parse(byId("tables").textContent));
  const state = fromFragment(location.hash), listeners = [];
  let waiting = false, result = null, networks = null, saving = 0;

  const refresh = makeControls(state, () => changed());
  const points = makePoints(byId("points"), plotFrame, state, () => changed());
  makeTheme(() => changed());

  function draw() {
    waiting = false;
    const begin = performance.now();
    result = compute(state);
    const computed = performance.now();
    refresh();
    points.refresh();
    drawPlot(state, result, state.width === Infinity ? null : networks);
    drawMatrix(state, gridGram(result.net)[state.kernel]);
    byId("clock").hidden = state.mode !== "training";
    byId("evidence-value").textContent = state.points.length ? result.evidence.toFixed(2) : "–";
    for (const listener of listeners) listener(state, result);
    const times = { computing: computed - begin, frame: performance.now() - begin };
    explorer.times = times;
    byId("speed").textContent = `Last frame: ${times.computing.toFixed(1)} ms computing, ${times.frame.toFixed(1)} ms in all.`;
    clearTimeout(saving);
    saving = setTimeout(() => history.replaceState(null, "", `#${toFragment(state)}`), 250);
  }

  function changed() {
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  }

  const set = (values) => {
    Object.assign(state, values);
    changed();
  };

  function bind() {
    fillSelect(byId("preset"), [["", "…"], ...Object.entries(PRESETS).map(([name, [label]]) => [name, label])]);
    byId("preset").addEventListener("change", (event) => {
      if (event.target.value) set({ points: PRESETS[event.target.value][1].map(roundPoint) });
      event.target.value = "";
    });
    byId("add").addEventListener("click", points.add);
    byId("redraw").addEventListener("click", () => set({ seed: (state.seed % 999983) + 1 }));
    window.addEventListener("resize", changed);
    window.addEventListener("hashchange", () => set(fromFragment(location.hash)));
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  return {
    state, set, changed, bind, draw, times: null,
    listen: (listener) => listeners.push(listener),
    show: (lines) => { networks = lines; changed(); },
    get result() { return result; },
  };
})();

explorer.bind();
explorer.draw();
