// Three charts below the plot: distance to the limit by width, the phase diagram, the evidence by depth.

const PHASE_W = [0.05, 6], PHASE_B = [0, 2];

const MARGINS = { left: 46, right: 12, top: 10, bottom: 36 };

function axisTitle(f, text) {
  f.context.fillStyle = color("muted");
  f.context.textAlign = "center";
  f.context.textBaseline = "bottom";
  f.context.fillText(text, f.margins.left + f.inner.width / 2, f.height - 1);
}

function drawWidths(rows, width) {
  const canvas = byId("widths"), f = frame(canvas, [Math.log(3.4), Math.log(1200)], [Math.log(0.0008), Math.log(3)], MARGINS);
  axes(f, WIDTHS.slice(0, -1).map(Math.log), [0.001, 0.01, 0.1, 1].map(Math.log), (v) => String(round(Math.exp(v), 4)));
  axisTitle(f, "width");
  const styles = [["kernel", color("draw"), [], "kernel"], ["mean", color("band"), [6, 3], "posterior mean"]];
  clipped(f, () => styles.forEach(([name, style, dash]) => {
    const shown = rows.filter((row) => row[name] > 0);
    const xs = shown.map((row) => Math.log(row.width)), ys = shown.map((row) => Math.log(row[name]));
    line(f, xs, ys, style, 2, dash);
    f.context.fillStyle = style;
    shown.forEach((row, i) => {
      const size = row.width === width ? 6 : 3.5;
      f.context.beginPath();
      f.context.arc(f.toX(xs[i]), f.toY(ys[i]), size, 0, TWO_PI);
      f.context.fill();
    });
  }));
  f.context.textAlign = "left";
  f.context.textBaseline = "middle";
  styles.forEach(([, style, dash, label], i) => {
    const x = f.margins.left + 8, y = f.margins.top + f.inner.height - 12 - 18 * (1 - i);
    f.context.strokeStyle = style;
    f.context.lineWidth = 2;
    f.context.setLineDash(dash);
    segment(f.context, x, y, x + 22, y);
    f.context.setLineDash([]);
    f.context.fillStyle = color("muted");
    f.context.fillText(label, x + 28, y);
  });
  const note = widthsNote(rows);
  byId("widths-note").textContent = note;
  canvas.setAttribute("aria-label", `Distance to the limit. ${note}`);
}

// The exponent of the width by least squares in logarithms
function widthsNote(rows) {
  const shown = rows.filter((row) => row.kernel > 0 && row.width >= 16);
  if (shown.length < 4) return "Drawing random networks of each width …";
  const xs = shown.map((row) => Math.log(row.width)), ys = shown.map((row) => Math.log(row.kernel)), n = xs.length;
  const mx = xs.reduce((a, b) => a + b) / n, my = ys.reduce((a, b) => a + b) / n;
  const exponent = xs.reduce((sum, x, i) => sum + (x - mx) * (ys[i] - my), 0) / xs.reduce((sum, x) => sum + (x - mx) ** 2, 0);
  const last = shown.at(-1);
  return `Kernels of random networks are off by ${(100 * last.kernel).toFixed(1)} % at width ${last.width}. ` +
    `The measured distance falls as width to the power ${exponent.toFixed(2)}; theory says −0.5.`.replace("-", "−");
}

const PHASES = { activation: "", values: null, line: [] };
const PHASE_SIZE = [36, 54];

// The critical line in parts, since it may jump from one fixed point to another
function criticalParts(activation) {
  const parts = [[]];
  for (let i = 0; i <= 80; i++) {
    const b = (i / 80) ** 2 * PHASE_B[1], w = criticalWeight(activation, b), part = parts.at(-1), before = part.at(-1);
    if (!Number.isFinite(w) || (before && Math.abs(w - before[0]) > 0.6)) parts.push([]);
    if (Number.isFinite(w)) parts.at(-1).push([w, b]);
  }
  return parts;
}

function phaseValues(activation) {
  if (PHASES.activation === activation) return PHASES;
  const [rows, columns] = PHASE_SIZE, values = new Float64Array(rows * columns);
  const at = (range, share) => range[0] + (range[1] - range[0]) * share;
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) {
      const w = at(PHASE_W, (j + 0.5) / columns), b = at(PHASE_B, 1 - (i + 0.5) / rows);
      values[i * columns + j] = Math.log(slopeAt(activation, w, fixedPoint(activation, w, b)));
    }
  }
  return Object.assign(PHASES, { activation, values, line: criticalParts(activation) });
}

const PHASE_MARGINS = { ...MARGINS, left: 34 };

const phaseFrameOf = (canvas) => mapping(canvas.clientWidth, canvas.clientHeight, PHASE_W, PHASE_B, PHASE_MARGINS);

function drawPhase(state) {
  const { activation, weightVar, biasVar, norm, skip } = state;
  if (!outdated(byId("phase"), [activation, weightVar, biasVar, norm, skip].join())) return;
  const { values, line: critical } = phaseValues(state.activation), f = frame(byId("phase"), PHASE_W, PHASE_B, PHASE_MARGINS);
  heatmap(f, values, ...PHASE_SIZE, (v) => 0.5 + v / 2.4, true);
  axes(f, [1, 2, 3, 4, 5, 6], [0, 1, 2]);
  axisTitle(f, "σ² of weights →    σ² of biases ↑");
  clipped(f, () => {
    for (const [style, width] of [["#ffffff", 4], ["#101418", 2]]) {
      for (const part of critical) line(f, part.map(([w]) => w), part.map(([, b]) => b), style, width);
    }
  });
  const x = f.toX(state.weightVar), y = f.toY(state.biasVar);
  for (const [style, width] of [["#101418", 5], ["#ffffff", 2.5]]) {
    f.context.strokeStyle = style;
    f.context.lineWidth = width;
    f.context.beginPath();
    f.context.arc(x, y, 7, 0, TWO_PI);
    f.context.stroke();
  }
  const note = phaseNote(state);
  byId("phase-note").textContent = note;
  byId("phase").setAttribute("aria-label", `Phase diagram. ${note} Arrow keys change the variances.`);
}

function phaseNote({ activation, weightVar, biasVar, norm, skip }) {
  const { q, chi, c, depth } = phaseAt(activation, weightVar, biasVar), layers = `${shortNumber(depth)} layers`;
  const plain = norm || skip ? " (Of the network without norm and skips.)" : "";
  if (Math.abs(chi - 1) < 2e-3) return `On the line, χ₁ = 1: networks of any depth can tell inputs apart.${plain}`;
  if (q === Infinity) return `The variance explodes with depth; χ₁ = ${shortNumber(chi)}. Click to choose variances.${plain}`;
  if (chi < 1) return `Order, χ₁ = ${shortNumber(chi)}: inputs become alike within about ${layers}. Click to choose variances.${plain}`;
  return `Chaos, χ₁ = ${shortNumber(chi)}: correlations end at ${shortNumber(c)} within about ${layers}. Click to choose variances.${plain}`;
}

function drawDepths(state, rows) {
  const finite = rows.filter((row) => Number.isFinite(row.evidence)), canvas = byId("depths");
  const values = finite.map((row) => row.evidence), top = finite.length ? Math.max(...values) : 0, low = Math.max(Math.min(...values, top - 4), top - 60);
  const pad = (top - low) * 0.12, f = frame(canvas, [0.6, 8.4], [low - pad, top + pad], MARGINS);
  const middle = Math.round((top + low) / 2);
  axes(f, [1, 2, 3, 4, 5, 6, 7, 8], [Math.round(low), middle, Math.round(top)]);
  axisTitle(f, "hidden layers");
  clipped(f, () => line(f, finite.map((row) => row.depth), values, color("band"), 2));
  for (const row of finite) {
    f.context.beginPath();
    f.context.arc(f.toX(row.depth), f.toY(Math.max(row.evidence, low - pad)), row.depth === state.depth ? 6.5 : 4, 0, TWO_PI);
    f.context.fillStyle = row.depth === state.depth ? color("draw") : color("band");
    f.context.fill();
  }
  const best = finite.reduce((a, b) => (b.evidence > a.evidence ? b : a), { depth: 0, evidence: -Infinity });
  const note = finite.length ? `log p(y) by depth, with the other choices as they are: best at ${best.depth}, ${best.evidence.toFixed(1)}.` : "Without data there is no evidence.";
  if (!byId("depths-note").dataset.busy) byId("depths-note").textContent = note;
  canvas.setAttribute("aria-label", `Evidence. ${note}`);
}
