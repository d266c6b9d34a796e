// Canvases in the pixels of the screen, and what is drawn on them.

const PALETTE = { theme: "" };

// The color that the style sheet has for a name, read once for each theme
function color(name) {
  const { theme } = document.documentElement.dataset;
  if (PALETTE.theme !== theme) {
    for (const key of Object.keys(PALETTE)) delete PALETTE[key];
    PALETTE.theme = theme;
  }
  PALETTE[name] ||= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return PALETTE[name];
}

const DRAWN_KEYS = new Map();

// Whether a canvas has to be drawn again: its size, the theme or what it shows has changed
function outdated(canvas, shown) {
  const key = [canvas.clientWidth, canvas.clientHeight, devicePixelRatio, document.documentElement.dataset.theme, shown].join();
  if (DRAWN_KEYS.get(canvas.id) === key) return false;
  DRAWN_KEYS.set(canvas.id, key);
  return true;
}

function prepare(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas, ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// Maps from values to pixels, and back, inside of margins
function mapping(width, height, x, y, margins) {
  const inner = { width: width - margins.left - margins.right, height: height - margins.top - margins.bottom };
  const toX = (v) => margins.left + ((v - x[0]) / (x[1] - x[0])) * inner.width;
  const toY = (v) => margins.top + ((y[1] - v) / (y[1] - y[0])) * inner.height;
  const fromX = (p) => x[0] + ((p - margins.left) / inner.width) * (x[1] - x[0]);
  const fromY = (p) => y[1] - ((p - margins.top) / inner.height) * (y[1] - y[0]);
  return { width, height, margins, inner, toX, toY, fromX, fromY };
}

// The same for a canvas, which is made empty
function frame(canvas, x, y, margins) {
  const { context, width, height } = prepare(canvas);
  return { context, ...mapping(width, height, x, y, margins) };
}

function axes(f, xTicks, yTicks, format = String) {
  const { context, margins, inner } = f;
  context.font = "12px system-ui, sans-serif";
  context.strokeStyle = color("grid");
  context.fillStyle = color("muted");
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const tick of xTicks) {
    segment(context, f.toX(tick), margins.top, f.toX(tick), margins.top + inner.height);
    context.fillText(format(tick), f.toX(tick), margins.top + inner.height + 6);
  }
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of yTicks) {
    segment(context, margins.left, f.toY(tick), margins.left + inner.width, f.toY(tick));
    context.fillText(format(tick), margins.left - 6, f.toY(tick));
  }
}

function segment(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function clipped(f, draw) {
  f.context.save();
  f.context.beginPath();
  f.context.rect(f.margins.left, f.margins.top, f.inner.width, f.inner.height);
  f.context.clip();
  draw();
  f.context.restore();
}

function trace(f, xs, ys) {
  f.context.beginPath();
  for (let i = 0; i < xs.length; i++) f.context.lineTo(f.toX(xs[i]), f.toY(ys[i]));
}

function line(f, xs, ys, style, width = 2, dash = []) {
  f.context.strokeStyle = style;
  f.context.lineWidth = width;
  f.context.setLineDash(dash);
  f.context.lineJoin = "round";
  trace(f, xs, ys);
  f.context.stroke();
  f.context.setLineDash([]);
}

// The area between mean − factor·std and mean + factor·std
function band(f, xs, mean, variance, factor, style, alpha) {
  f.context.beginPath();
  for (let i = 0; i < xs.length; i++) f.context.lineTo(f.toX(xs[i]), f.toY(mean[i] + factor * Math.sqrt(variance[i])));
  for (let i = xs.length - 1; i >= 0; i--) {
    f.context.lineTo(f.toX(xs[i]), f.toY(mean[i] - factor * Math.sqrt(variance[i])));
  }
  f.context.closePath();
  f.context.globalAlpha = alpha;
  f.context.fillStyle = style;
  f.context.fill();
  f.context.globalAlpha = 1;
}

// A band of one and two standard deviations, its mean, and lines; the same in every plot of functions
function drawLaw(f, xs, law, lines = [], lineStyle = color("draw"), lineWidth = 1.3) {
  clipped(f, () => {
    band(f, xs, law.mean, law.variance, 2, color("band"), 0.2);
    band(f, xs, law.mean, law.variance, 1, color("band"), 0.28);
    for (const values of lines) line(f, xs, values, lineStyle, lineWidth);
    line(f, xs, law.mean, color("mean"), 2.4);
  });
}

function dots(f, points, radius = 3.5) {
  for (const [x, y] of points) {
    f.context.beginPath();
    f.context.arc(f.toX(x), f.toY(y), radius, 0, TWO_PI);
    f.context.fillStyle = color("point");
    f.context.fill();
    f.context.strokeStyle = color("paper");
    f.context.lineWidth = 1.5;
    f.context.stroke();
  }
}

// From dark blue over gray to yellow, which everyone can order by lightness
const SCALE = [[0, 34, 78], [42, 63, 109], [87, 92, 109], [125, 124, 120], [165, 156, 116], [211, 193, 100], [254, 232, 56]];

function scaleColor(value) {
  const at = Math.min(Math.max(value, 0), 1) * (SCALE.length - 1), i = Math.min(Math.floor(at), SCALE.length - 2);
  return SCALE[i].map((c, n) => Math.round(c + (SCALE[i + 1][n] - c) * (at - i)));
}

// An image of values (rows × columns, first row on top) that fills the frame
function heatmap(f, values, rows, columns, toUnit, smooth = false) {
  const image = document.createElement("canvas");
  image.width = columns;
  image.height = rows;
  const context = image.getContext("2d"), pixels = context.createImageData(columns, rows);
  for (let i = 0; i < rows * columns; i++) {
    const [r, g, b] = scaleColor(toUnit(values[i]));
    pixels.data.set([r, g, b, Number.isFinite(values[i]) ? 255 : 0], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
  f.context.imageSmoothingEnabled = smooth;
  f.context.drawImage(image, f.margins.left, f.margins.top, f.inner.width, f.inner.height);
}
