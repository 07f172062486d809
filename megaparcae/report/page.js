// Values under the pointer, a finger or the arrow keys.
for (const figure of document.querySelectorAll("figure.chart")) {
  const plot = figure.querySelector(".plot");
  if (!plot) continue;
  const data = JSON.parse(figure.querySelector("script").textContent);
  const places = [...new Set(data.lines.flatMap((line) => line.points.map((p) => p[2])))];
  places.sort((a, b) => a - b);
  const cursor = document.createElement("i");
  const tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  let index = -1;

  const nearest = (points, at) =>
    points.reduce((best, p) => (Math.abs(p[2] - at) < Math.abs(best[2] - at) ? p : best));

  function show(at) {
    const reach = Math.max(1.5, 60 / places.length);
    const found = data.lines
      .filter((line) => line.points.length)
      .map((line) => [line, nearest(line.points, at)])
      .filter(([, p]) => Math.abs(p[2] - at) <= reach);
    if (!found.length) return hide();
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = `${data.x} ${Math.round(found[0][1][0]).toLocaleString("en")}`;
    tip.append(head);
    for (const [line, point] of found) {
      const row = document.createElement("div");
      const dot = document.createElement("i");
      dot.style.setProperty("--c", line.color);
      row.append(dot, `${line.name}: ${point[1]}`);
      tip.append(row);
    }
    for (const [place, what] of data.marks) {
      if (Math.abs(place - at) < 1) tip.append(Object.assign(document.createElement("div"), { textContent: what }));
    }
    cursor.style.left = `${at}%`;
    tip.style.left = at < 50 ? `calc(${at}% + .6rem)` : "auto";
    tip.style.right = at < 50 ? "auto" : `calc(${100 - at}% + .6rem)`;
    plot.append(cursor, tip);
  }

  function hide() {
    cursor.remove();
    tip.remove();
  }

  function follow(event) {
    const box = plot.getBoundingClientRect();
    const at = (100 * (event.clientX - box.left)) / box.width;
    const place = places.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    index = places.indexOf(place);
    show(place);
  }

  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    index = Math.min(places.length - 1, Math.max(0, index + step));
    show(places[index]);
  });
}
