// Inputs of the page: each shows the state and changes it.

const byId = (id) => document.getElementById(id);

function fillSelect(select, entries) {
  for (const [value, label] of entries) select.add(new Option(label, value));
}

function shortNumber(value) {
  if (value === Infinity) return "∞";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(1).replace("e", " e") : String(round(value, 3));
}

// Range inputs, each with the state's name, and maps between its position and the value
function slider(id, state, changed, toValue, toPosition, show = shortNumber) {
  const input = byId(id), output = byId(`${id}-value`);
  input.addEventListener("input", () => {
    state[id] = toValue(Number(input.value));
    changed();
  });
  return () => {
    input.value = toPosition(state[id]);
    output.textContent = show(state[id]);
    input.setAttribute("aria-valuetext", show(state[id]));
  };
}

function checkbox(id, state, changed) {
  const input = byId(id);
  input.addEventListener("change", () => {
    state[id] = input.checked;
    changed();
  });
  return () => { input.checked = state[id]; };
}

// Buttons of which one is chosen; arrow keys move between them
function segments(id, state, changed) {
  const buttons = [...byId(id).children];
  const choose = (button) => {
    state[id] = button.dataset[id];
    changed();
    button.focus();
  };
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => choose(button));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      choose(buttons[(i + step + buttons.length) % buttons.length]);
    });
  });
  return () => {
    for (const button of buttons) {
      const chosen = button.dataset[id] === state[id];
      button.setAttribute("aria-checked", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
    }
  };
}

// A slider over steps 1 … 2000 whose position is their logarithm
const STEPS_LOG = Math.log(LIMITS.steps[1]);

function makeControls(state, changed) {
  const activation = byId("activation");
  fillSelect(activation, Object.entries(ACTIVATIONS).map(([name, { label }]) => [name, label]));
  activation.addEventListener("change", () => {
    state.activation = activation.value;
    changed();
  });
  const same = (value) => value;
  const refreshers = [
    () => { activation.value = state.activation; },
    slider("depth", state, changed, same, same),
    slider("width", state, changed, (i) => WIDTHS[i], (width) => WIDTHS.indexOf(width), (width) => (width === Infinity ? "∞" : String(width))),
    slider("weightVar", state, changed, same, same),
    slider("biasVar", state, changed, same, same),
    slider("noise", state, changed, (log) => round(10 ** log, 3), Math.log10),
    slider("steps", state, changed, (at) => Math.round(Math.exp(at * STEPS_LOG)), (steps) => Math.log(steps) / STEPS_LOG),
    checkbox("norm", state, changed),
    checkbox("skip", state, changed),
    segments("mode", state, changed),
    segments("kernel", state, changed),
  ];
  return () => refreshers.forEach((refresh) => refresh());
}

// Light or dark as the system has it, until the button is pressed
function makeTheme(changed) {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const use = (theme) => {
    document.documentElement.dataset.theme = theme;
    changed();
  };
  byId("theme").addEventListener("click", () => {
    use(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  dark.addEventListener("change", () => use(dark.matches ? "dark" : "light"));
  document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
}
