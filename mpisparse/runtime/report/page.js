// Values under the pointer. The page is whole without it.
(() => {
  const units = {
    bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
    seconds: [[3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]],
    percent: [[0.01, "%"]],
  };
  const say = (value, kind) => {
    const scale = units[kind];
    const [factor, unit] = scale ? scale.find(([f]) => Math.abs(value) >= f) || scale[scale.length - 1] : [1, ""];
    const number = value / factor;
    const digits = kind === "count" ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
    const tiny = number !== 0 && Math.abs(number) < 1e-4;
    return (tiny ? number.toExponential(2) : number.toLocaleString("en", digits)) + (unit && " " + unit);
  };
  const axis = (text) => {
    const [lo, hi, log, kind, ...name] = text.split(" ");
    const [a, b] = [Number(lo), Number(hi)];
    return { kind, name: name.join(" "), at: (p) => (log === "1" ? a * (b / a) ** p : a + (b - a) * p) };
  };
  const points = (path) => (path.points ??= path.getAttribute("d").split(/[MLz]/).filter(Boolean).map((p) => p.split(/[ h]/).map(Number)));
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  for (const svg of document.querySelectorAll("figure > svg")) {
    const title = svg.querySelector("title");
    svg.setAttribute("aria-label", title.textContent);
    title.remove(); // or the browser's own tip covers this one
    if (!svg.dataset.box) continue;
    const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
    const [x, y] = [axis(svg.dataset.x), axis(svg.dataset.y)];
    const named = [...svg.querySelectorAll("path[data-name].line, path[data-name].area")];
    const guide = svg.appendChild(document.createElementNS(svg.namespaceURI, "path"));
    guide.setAttribute("class", "guide");

    const value = (path, px) => {
      let all = points(path);
      const area = path.classList.contains("area");
      if (area) all = all.slice(0, all.length / 2);
      let best = 0;
      all.forEach((p, i) => { if (Math.abs(p[0] - px) < Math.abs(all[best][0] - px)) best = i; });
      const up = (py) => y.at((bottom - py) / (bottom - top));
      const under = area ? points(path)[points(path).length - 1 - best] : null;
      return { first: all[0][0], last: all[all.length - 1][0], y: area ? up(all[best][1]) - up(under[1]) : up(all[best][1]) };
    };
    const hide = () => { tip.hidden = true; guide.setAttribute("d", ""); };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      if (px < left - 4 || px > right + 4) return hide();
      guide.setAttribute("d", `M${px} ${top}V${bottom}`);
      tip.replaceChildren(`${x.name}: ${say(x.at((px - left) / (right - left)), x.kind)}`);
      for (const path of named.filter((p) => getComputedStyle(p).display !== "none").reverse()) {
        const near = value(path, px);
        if (px < near.first - 20 || px > near.last + 20) continue;
        const [row, dot, number] = ["div", "i", "b"].map((tag) => document.createElement(tag));
        dot.style.background = getComputedStyle(path).getPropertyValue("--c");
        number.textContent = say(near.y, y.kind);
        row.append(dot, path.dataset.name, number);
        tip.append(row);
      }
      tip.hidden = false;
      const beyond = event.clientX + tip.offsetWidth + 24 > innerWidth;
      tip.style.left = `${Math.max(4, beyond ? event.clientX - tip.offsetWidth - 14 : event.clientX + 14)}px`;
      tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
    });
    svg.addEventListener("dblclick", () => svg.parentElement.classList.toggle("large"));
  }
})();
