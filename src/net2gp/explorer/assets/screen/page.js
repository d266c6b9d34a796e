// The page: one state, one loop. A change of the state asks for the next frame, which computes and draws.

const explorer = (() => {
  loadTables(JSON.parse(byId("tables").textContent));
  const state = fromFragment(location.hash), later = [];
  let waiting = false, result = null, saving = 0, finite = null;

  const refresh = makeControls(state, () => changed());
  const points = makePoints(byId("points"), plotFrame, state, () => changed());
  makeTheme(() => changed());

  function draw() {
    waiting = false;
    const begin = performance.now();
    result = compute(state);
    if (finite) finite.ask(state, result);
    const lines = finite && finite.lines(state, result), computed = performance.now();
    refresh();
    points.refresh();
    drawPlot(state, result, lines);
    tellStory(state, result, lines);
    drawMatrix(state, result.net);
    drawPhase(state);
    byId("clock").hidden = state.mode !== "training";
    byId("evidence-value").textContent = state.points.length ? result.evidence.toFixed(2) : "–";
    const times = { computing: computed - begin, frame: performance.now() - begin };
    explorer.times = times;
    byId("speed").textContent = `Last frame: ${times.computing.toFixed(1)} ms computing, ${times.frame.toFixed(1)} ms in all.`;
    clearTimeout(saving);
    saving = setTimeout(settle, 200);
  }

  // What need not follow every frame
  function settle() {
    const fragment = `#${toFragment(state)}`;
    if (location.hash !== fragment) history.replaceState(null, "", fragment);
    for (const { follow, holder } of later) if (!holder || visible.has(holder)) follow(state, result);
  }

  // Parts of the page below the window compute nothing until they are looked at
  const visible = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) visible.add(target);
      else visible.delete(target);
    }
    if (entries.some(({ isIntersecting }) => isIntersecting)) changed();
  }, { rootMargin: "120px" });

  function follow(follower, id = null) {
    const holder = id && byId(id);
    if (holder) watcher.observe(holder);
    later.push({ follow: follower, holder });
  }

  function changed() {
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  }

  const set = (values) => {
    Object.assign(state, values);
    changed();
  };

  // Numbers move to their new values within half a second, unless less motion is wanted
  function glide(values) {
    const { activation, depth, ...numbers } = values, first = { ...state }, begin = performance.now();
    const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (activation) Object.assign(state, { activation, depth });
    const step = () => {
      const share = still ? 1 : Math.min((performance.now() - begin) / 450, 1), ease = share * share * (3 - 2 * share);
      for (const [name, end] of Object.entries(numbers)) state[name] = share === 1 ? end : first[name] + ease * (end - first[name]);
      changed();
      if (share < 1) requestAnimationFrame(step);
    };
    step();
  }

  function bind() {
    fillSelect(byId("preset"), [["", "…"], ...Object.entries(PRESETS).map(([name, [label]]) => [name, label])]);
    byId("preset").addEventListener("change", (event) => {
      if (event.target.value) set({ points: PRESETS[event.target.value][1].map(roundPoint) });
      event.target.value = "";
    });
    byId("add").addEventListener("click", points.add);
    byId("link").addEventListener("click", () => {
      settle();
      navigator.clipboard.writeText(location.href).then(() => { byId("link").textContent = "Copied"; }, () => {
        byId("link").textContent = "It is the address of this page";
      });
      setTimeout(() => { byId("link").textContent = "Copy a link"; }, 2000);
    });
    byId("redraw").addEventListener("click", () => set({ seed: (state.seed % 999983) + 1 }));
    window.addEventListener("resize", changed);
    window.addEventListener("hashchange", () => set(fromFragment(location.hash)));
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  function start() {
    bind();
    finite = makeFinite(explorer);
    makePlayer(explorer);
    explorer.eight = makeEight(explorer);
    follow(explorer.eight.follow, "eight");
    follow(makeCharts(explorer), "widths");
    follow(makePython(explorer));
    if (byId("own")) makeOwn(explorer);
    draw();
  }

  return { state, set, changed, glide, draw, start, follow, times: null, get result() { return result; }, get finite() { return finite; } };
})();

explorer.start();
