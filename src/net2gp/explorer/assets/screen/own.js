// A network that somebody handed over: what net2gp computed on a line or a plane through its data.

const OWN_MARGINS = { left: 52, right: 12, top: 10, bottom: 38 };

// About five round numbers within a range
function niceTicks([low, high]) {
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw)), lead = raw / power;
  const step = (lead > 5 ? 10 : lead > 2 ? 5 : lead > 1 ? 2 : 1) * power, ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(Number((i * step).toPrecision(6)));
  return ticks;
}

const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

function ownField(own, name) {
  const field = own.fields.find((one) => one.name === name);
  field.numbers ||= decodeFloats(field.values);
  return field.numbers;
}

const gridAt = (own, axis, i) => own.ranges[axis][0] + ((own.ranges[axis][1] - own.ranges[axis][0]) * i) / (own.side - 1);

// The band and the targets, but no more than the targets' own range on either side of them
function lineRange(own, mean, std) {
  const [least, most] = extent(own.targets), reach = most - least || 1;
  const [low, high] = extent([...mean.map((v, i) => v - 2 * std[i]), ...mean.map((v, i) => v + 2 * std[i]), least, most]);
  return [Math.max(low, least - reach), Math.min(high, most + reach)];
}

function drawOwnLine(own, canvas, name) {
  const xs = Array.from({ length: own.side }, (_, i) => gridAt(own, 0, i)), values = ownField(own, name);
  const isMean = name === "mean", std = isMean ? ownField(own, "standard deviation") : null;
  const [low, high] = isMean ? lineRange(own, values, std) : extent([...values, 0]), pad = (high - low || 1) * 0.05;
  const range = [low - pad, high + pad];
  const f = frame(canvas, own.ranges[0], range, OWN_MARGINS);
  axes(f, niceTicks(own.ranges[0]), niceTicks(range), shortNumber);
  axisTitle(f, own.axes[0]);
  if (isMean) {
    drawLaw(f, xs, { mean: values, variance: std.map((v) => v * v) });
    dots(f, own.points.map(([x], n) => [x, own.targets[n]]), 4);
  } else clipped(f, () => line(f, xs, values, color("mean"), 2.4));
  return f;
}

function drawOwnPlane(own, canvas, name) {
  const f = frame(canvas, own.ranges[0], own.ranges[1], OWN_MARGINS), values = ownField(own, name), [low, high] = extent(values);
  heatmap(f, values, own.side, own.side, (v) => (v - low) / (high - low || 1), true);
  axes(f, niceTicks(own.ranges[0]), niceTicks(own.ranges[1]), shortNumber);
  axisTitle(f, `${own.axes[0]} →    ${own.axes[1]} ↑`);
  const [least, most] = extent(own.targets), shown = name.match(/^probability of class (\d+)$/);
  const shade = (target) => (shown ? Number(target === Number(shown[1])) : (target - least) / (most - least || 1));
  clipped(f, () => own.points.forEach(([x, y], n) => {
    const [r, g, b] = scaleColor(shade(own.targets[n]));
    f.context.beginPath();
    f.context.arc(f.toX(x), f.toY(y), 4.5, 0, TWO_PI);
    f.context.fillStyle = `rgb(${r} ${g} ${b})`;
    f.context.fill();
    f.context.strokeStyle = "#ffffff";
    f.context.lineWidth = 1.5;
    f.context.stroke();
  }));
  return f;
}

function drawOwnKernel(own) {
  if (!own.kernel) {
    byId("own-kernel").hidden = true;
    byId("own-kernel-note").textContent = "This posterior has no kernel of its own.";
    return;
  }
  const { size, values } = own.kernel, K = decodeFloats(values), canvas = byId("own-kernel");
  const correlation = K.map((v, i) => v / Math.sqrt(K[Math.floor(i / size) * (size + 1)] * K[(i % size) * (size + 1)]));
  const [low] = extent(correlation), f = frame(canvas, [0, size], [0, size], { left: 4, right: 4, top: 4, bottom: 4 });
  heatmap(f, correlation, size, size, (v) => (v - low) / (1 - low || 1));
  byId("own-kernel-note").textContent = `Prior correlation of its outputs at ${size} training points, in the order of the ` +
    `${own.axes[0]}, from ${shortNumber(round(low, 3))} (dark) to 1 (bright): what it takes for similar.`;
  canvas.setAttribute("aria-label", byId("own-kernel-note").textContent);
}

function makeOwn(explorer) {
  const own = JSON.parse(byId("own-values").textContent), canvas = byId("own-plot"), select = byId("own-field");
  let at = null, f = null;
  fillSelect(select, own.fields.map(({ name }) => [name, name]));
  const share = own.shares.reduce((a, b) => a + b);
  const slice = own.axes[0] === "first component" ? ` The plane of the first two principal components holds ${percent(share)} of the variance of the inputs; all else is at its mean.` : "";
  byId("own-about").textContent = `Computed by net2gp: ${own.about}${slice}`;

  const say = () => {
    const values = ownField(own, select.value), [low, high] = extent(values);
    let text = `${select.value}: from ${shortNumber(round(low, 3))} to ${shortNumber(round(high, 3))}. Point at a place, or use arrow keys.`;
    if (at) {
      const places = own.axes.map((axis, a) => `${axis} ${shortNumber(round(gridAt(own, a, at[a]), 3))}`).join(", ");
      const row = own.axes.length === 2 ? own.side - 1 - at[1] : 0, index = row * own.side + at[0];
      text = `At ${places}: ${own.fields.map(({ name }) => `${name} ${shortNumber(round(ownField(own, name)[index], 3))}`).join(", ")}.`;
    }
    byId("own-note").textContent = text;
    canvas.setAttribute("aria-label", text);
  };

  const draw = () => {
    f = (own.axes.length === 2 ? drawOwnPlane : drawOwnLine)(own, canvas, select.value);
    if (at) {
      f.context.strokeStyle = color("warm");
      f.context.lineWidth = 2;
      const x = f.toX(gridAt(own, 0, at[0]));
      segment(f.context, x, f.margins.top, x, f.margins.top + f.inner.height);
      if (at.length === 2) segment(f.context, f.margins.left, f.toY(gridAt(own, 1, at[1])), f.margins.left + f.inner.width, f.toY(gridAt(own, 1, at[1])));
    }
    drawOwnKernel(own);
    say();
  };

  const go = (indices) => {
    at = indices.map((i) => Math.min(Math.max(Math.round(i), 0), own.side - 1));
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), place = [f.fromX(event.clientX - box.left), f.fromY(event.clientY - box.top)];
    go(own.ranges.map(([low, high], a) => ((place[a] - low) / (high - low)) * (own.side - 1)));
  });
  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  canvas.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    go((at || own.ranges.map(() => (own.side - 1) / 2)).map((i, a) => i + step[a]));
  });
  select.addEventListener("change", draw);
  explorer.follow(draw);
  draw();
  explorer.own = own;
}
