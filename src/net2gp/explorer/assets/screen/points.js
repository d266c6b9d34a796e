// Data points on the plot as buttons: mouse, touch and keyboard move them. One of them is in the order of
// the Tab key; "[" and "]" go to its neighbors.

function makePoints(holder, plot, state, changed) {
  let active = 0, dragged = null;

  const place = (button, i) => {
    const f = plot(), [x, y] = state.points[i], key = [x, y, f.width, f.height, i === active, state.points.length].join();
    if (button.dataset.key === key) return;
    button.dataset.key = key;
    button.style.transform = `translate(${f.toX(x)}px, ${f.toY(y)}px)`;
    button.setAttribute("aria-label", `Point ${i + 1} of ${state.points.length}: x ${x}, y ${y}. ` +
      `Arrow keys move it, Delete removes it, [ and ] go to other points.`);
    button.tabIndex = i === active ? 0 : -1;
  };

  const refresh = () => {
    while (holder.children.length > state.points.length) holder.lastChild.remove();
    while (holder.children.length < state.points.length) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "point";
      holder.append(button);
    }
    active = Math.max(0, Math.min(active, state.points.length - 1));
    [...holder.children].forEach(place);
  };

  const move = (i, point) => {
    state.points[i] = clampPoint(point);
    changed();
  };

  const remove = (i) => {
    state.points.splice(i, 1);
    refresh();
    changed();
    if (holder.children[active]) holder.children[active].focus();
  };

  const at = (event) => {
    const box = holder.getBoundingClientRect(), f = plot();
    return [f.fromX(event.clientX - box.left), f.fromY(event.clientY - box.top)];
  };

  const index = (target) => [...holder.children].indexOf(target);

  holder.addEventListener("pointerdown", (event) => {
    const i = index(event.target);
    if (i < 0) return;
    active = dragged = i;
    event.target.setPointerCapture(event.pointerId);
    refresh();
  });
  holder.addEventListener("pointermove", (event) => {
    if (dragged !== null) move(dragged, at(event));
  });
  for (const end of ["pointerup", "pointercancel"]) holder.addEventListener(end, () => { dragged = null; });

  holder.addEventListener("dblclick", (event) => {
    const i = index(event.target);
    if (i >= 0) remove(i);
    else if (state.points.length < 60) {
      state.points.push(clampPoint(at(event)));
      active = state.points.length - 1;
      refresh();
      changed();
    }
  });

  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  holder.addEventListener("keydown", (event) => {
    const i = index(event.target), step = STEPS[event.key], size = event.shiftKey ? 0.25 : 0.05;
    if (i < 0) return;
    if (step) move(i, [state.points[i][0] + step[0] * size, state.points[i][1] + step[1] * size]);
    else if (event.key === "Delete" || event.key === "Backspace") remove(i);
    else if (event.key === "[" || event.key === "]") {
      const ordered = state.points.map((_, n) => n).sort((a, b) => state.points[a][0] - state.points[b][0]);
      const shift = event.key === "]" ? 1 : ordered.length - 1;
      active = ordered[(ordered.indexOf(i) + shift) % ordered.length];
      refresh();
      holder.children[active].focus();
    } else return;
    event.preventDefault();
  });

  const add = () => {
    if (state.points.length >= 60) return;
    state.points.push([0, 0]);
    active = state.points.length - 1;
    refresh();
    changed();
    holder.children[active].focus();
  };

  return { refresh, add };
}
