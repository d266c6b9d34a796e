"""What the page needs besides its text: colors, layout, and the few lines that move the slider's marker."""

STYLE = """
:root { --a: #0072b2; --b: #c04f00; --c: #00785a; --band: #0072b226; --good: #00785a; --warn: #b04a00; }
@media (prefers-color-scheme: dark) { :root { --a: #56b4e9; --b: #f0925a; --c: #35c99f; --band: #56b4e933;
  --good: #35c99f; --warn: #f0925a; } figure { filter: none; } }
main { max-width: 66rem; }
a { color: var(--accent); }
a:focus-visible, input:focus-visible, summary:focus-visible, .scroll:focus-visible {
  outline: 3px solid var(--accent); outline-offset: 2px; }
h3 { font-size: 1.08rem; margin: 1.6rem 0 0.5rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.3rem 1.1rem; list-style: none; margin: 0 0 1rem; padding: 0; }
nav a { display: inline-block; padding: 0.25rem 0; }
header { border: 0; padding: 0; margin-bottom: 1.2rem; }
header p { max-width: 50rem; font-size: 1rem; }
.verdict { list-style: none; margin: 0; padding: 0; display: grid; gap: 0.7rem; max-width: 52rem; }
.verdict li { border-left: 5px solid var(--soft); background: var(--panel); padding: 0.7rem 1rem;
  border-radius: 0 8px 8px 0; font-size: 1.04rem; }
.verdict .good { border-color: var(--good); } .verdict .warn { border-color: var(--warn); }
.verdict b { display: inline-block; margin-right: 0.4rem; }
.good b { color: var(--good); } .warn b { color: var(--warn); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.8rem;
  margin: 1.2rem 0 0; padding: 0; }
.cards div { border: 1px solid var(--line); border-radius: 8px; padding: 0.6rem 0.8rem; }
.cards dt { color: var(--soft); font-size: 0.86rem; }
.cards dd { margin: 0; font-size: 1.45rem; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.cards small { display: block; font-size: 0.8rem; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1rem;
  margin: 1rem 0; }
figure.chart { background: var(--panel); border: 0; padding: 0.6rem; max-width: 34rem; }
figure.chart svg { display: block; width: 100%; height: auto; }
.line { fill: none; stroke-width: 2.4; } .a { stroke: var(--a); } .b { stroke: var(--b); }
.c { stroke: var(--c); } .line.b { stroke-dasharray: 8 4; } .line.c { stroke-dasharray: 2.5 3.5; }
.line.ideal { stroke: var(--soft); stroke-width: 1.2; } .dot { stroke: none; } .dot.a { fill: var(--a); }
.dot.b { fill: var(--b); } .dot.c { fill: var(--c); } .bar { fill-opacity: 0.16; stroke-width: 1.8; }
.bar.a { fill: var(--a); } .bar.b { fill: var(--b); stroke-dasharray: 8 4; } .band { fill: var(--band); }
.range { stroke: var(--band); stroke-width: 16; } .grid { stroke: var(--line); }
.marker { stroke: var(--ink); stroke-width: 1.6; }
.tick, .name { fill: var(--ink); font-size: 15px; text-anchor: middle; }
.tick { fill: var(--soft); } .tick.up { text-anchor: end; }
.legend { list-style: none; margin: 0.3rem 0 0; padding: 0; font-size: 0.88rem; display: flex;
  flex-wrap: wrap; gap: 0.1rem 1rem; }
figure.chart .legend svg { display: inline-block; width: 34px; height: 14px; margin-right: 0.4rem;
  vertical-align: -1px; }
.slider { display: none; margin: 0.5rem 0 1rem; max-width: 34rem; }
.slider.on { display: block; } .slider input { width: 100%; height: 2rem; accent-color: var(--accent); }
.slider output { display: block; font-weight: 600; min-height: 3.1em; }
.flag { font-weight: 600; color: var(--warn); white-space: nowrap; }
th, td { vertical-align: baseline; } td { white-space: nowrap; } td small { margin-left: 0.2rem; }
#calibration td small { display: block; }
tbody th { min-width: 8rem; text-align: left; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(15rem, 100%), 1fr)); gap: 0.8rem;
  list-style: none; margin: 0.6rem 0; padding: 0; }
.tiles > li { border: 1px solid var(--line); border-radius: 8px; padding: 0.7rem; font-size: 0.9rem;
  overflow-wrap: anywhere; }
.tile { width: 72px; height: 72px; object-fit: contain; image-rendering: pixelated; border-radius: 4px;
  border: 1px solid var(--line); background: #000; }
.pulls { display: flex; flex-wrap: wrap; gap: 0.5rem; list-style: none; padding: 0; margin: 0.4rem 0 0;
  font-size: 0.8rem; color: var(--soft); } .pulls .tile { width: 46px; height: 46px; display: block; }
.below th, .below td { color: var(--soft); font-size: 0.88rem; }
.below th { padding-left: 1rem; white-space: nowrap; }
.facts { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 0.25rem 1rem; margin: 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
details { margin: 0.8rem 0; } summary { cursor: pointer; padding: 0.2rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: 0.9rem; }
@media (max-width: 34rem) { main { padding: 1.4rem 1rem 3rem; } .facts { display: block; }
  .facts dd { margin-bottom: 0.5rem; } section { padding: 1.4rem 0; } th, td { padding-right: 0.7rem; } }
@media print { .slider, nav { display: none !important; } }
""".strip()

SCRIPT = """
(function () {
  var box = document.getElementById("abstain"), slider = document.getElementById("refused");
  if (!box || !slider) return;
  var curve = JSON.parse(document.getElementById("curve").textContent);
  var mark = document.getElementById("kept"), text = document.getElementById("kept-text");
  function plain(value) {
    var text = value.toPrecision(3), size = Math.abs(value);
    return text.indexOf("e") < 0 || size >= 1e7 || size < 1e-5 ? text : String(Number(text));
  }
  function show() {
    var row = curve.rows[Number(slider.value)], m = mark.dataset;
    var x = Number(m.left) + (m.right - m.left) * (row[0] - m.low) / (m.high - m.low);
    mark.setAttribute("x1", x); mark.setAttribute("x2", x);
    var error = curve.percent ? (100 * row[1]).toFixed(2) + " %" : plain(row[1]);
    text.textContent = "Refuse " + row[0] + " %: answer where " + curve.doubt + " ≤ " +
      plain(row[2]) + ". The " + curve.error + " of the " + row[3] + " points that are kept is " +
      error + ".";
    slider.setAttribute("aria-valuetext", text.textContent);
  }
  box.classList.add("on");
  slider.addEventListener("input", show);
  show();
})();
""".strip()
