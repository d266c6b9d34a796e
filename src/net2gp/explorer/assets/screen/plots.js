// The main plot and the kernel matrix.

const PLOT_MARGINS = { left: 30, right: 8, top: 8, bottom: 24 };

const plotFrame = () => mapping(byId("plot").clientWidth, byId("plot").clientHeight, X_RANGE, Y_RANGE, PLOT_MARGINS);

const LINE_NAMES = {
  prior: ["random functions", "random networks"],
  posterior: ["drawn functions", "means of networks"],
  training: ["", "trained networks"],
};

function drawLegend(state) {
  const name = LINE_NAMES[state.mode][state.width === Infinity ? 0 : 1];
  const lines = name && (state.width === Infinity ? name : `${name} of width ${state.width}`);
  const html = `<li><i style="border-color:${color("mean")}"></i>mean</li>` +
    `<li><i class="area" style="background:${color("band")}"></i>1 and 2 standard deviations</li>` +
    (lines ? `<li><i style="border-color:${color("draw")}"></i>${lines}</li>` : "");
  if (byId("legend").innerHTML !== html) byId("legend").innerHTML = html;
}

function drawPlot(state, result, networks) {
  const f = frame(byId("plot"), X_RANGE, Y_RANGE, PLOT_MARGINS);
  axes(f, [-3, -2, -1, 0, 1, 2, 3], [-2, -1, 0, 1, 2]);
  drawLaw(f, GRID, result, networks ? networks.lines : result.lines);
  drawLegend(state);
  const widest = Math.sqrt(Math.max(...result.variance));
  byId("plot").setAttribute("aria-label",
    `${state.mode} of an infinitely wide network given ${state.points.length} points: ` +
    `the largest standard deviation between x = −3 and 3 is ${shortNumber(widest)}`);
}

// Correlations on a grid: what a network takes for similar
const PLACES = Float64Array.from({ length: 41 }, (_, i) => X_RANGE[0] + ((X_RANGE[1] - X_RANGE[0]) * i) / 40);

const matrixKernel = (net, kernel) => gramKernels(net, diagonals(net, PLACES))[kernel];

function drawMatrix(state, net) {
  const canvas = byId("matrix");
  if (!outdated(canvas, JSON.stringify([net, state.kernel]))) return;
  const gram = matrixKernel(net, state.kernel), size = PLACES.length;
  const f = frame(canvas, X_RANGE, X_RANGE, { left: 22, right: 4, top: 4, bottom: 22 });
  const at = (i, j) => gram[i * size + j];
  const values = new Float64Array(size * size);
  let lowest = 1;
  for (let i = 0; i < size; i++) {
    for (let j = 0; j < size; j++) {
      const value = at(i, j) / Math.sqrt(at(i, i) * at(j, j));
      values[(size - 1 - i) * size + j] = value;
      lowest = Math.min(lowest, value);
    }
  }
  const low = Math.min(lowest, 0.999);
  heatmap(f, values, size, size, (v) => (v - low) / (1 - low));
  axes(f, [-3, 0, 3], [-3, 0, 3]);
  const middle = Math.sqrt(at((size - 1) / 2, (size - 1) / 2)), end = Math.sqrt(at(size - 1, size - 1));
  byId("matrix-note").textContent = `Correlation of the outputs at two places, from ${shortNumber(lowest)} ` +
    `(dark) to 1 (bright). √k(x, x) is ${shortNumber(middle)} at 0 and ${shortNumber(end)} at 3.`;
  canvas.setAttribute("aria-label", byId("matrix-note").textContent);
}
