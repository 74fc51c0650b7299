// Two charts: bars with intervals and marks, made of boxes so that labels keep their size on a phone, and curves.

const PALETTE = ["#d1741f", "#7b5ea7", "#2a8f8a", "#b23a6b", "#6b7a1f"];

// An item: {label, value, interval, kind, note, go, marks: [{at, name, color}]}; values from 0 to `top`.
function bars(items, top = 100) {
  const at = value => `${Math.min(100, Math.max(0, 100 * value / top)).toFixed(2)}%`;
  const lines = items.map(item => {
    const low = item.interval && item.interval[0], high = item.interval && item.interval[1];
    const whisker = item.interval ? `<i class="whisker" style="left:${at(low)};width:calc(${at(high - low)})"></i>` : "";
    const marks = (item.marks || []).map(mark => `<i class="mark" style="left:${at(mark.at)};background:${mark.color}" title="${escape(mark.name)}: ${mark.at}"></i>`).join("");
    const fill = item.value == null ? "" : `<i class="fill" style="width:${at(item.value)}"></i>`;
    const go = item.go ? ` data-go="${escape(JSON.stringify(item.go))}" tabindex="0"` : "";
    return `<div class="bar ${item.kind || ""}"${go}><span class="label">${item.label}</span><span class="track">${fill}${whisker}${marks}</span>` +
      `<span class="value">${item.value == null ? "–" : item.value.toFixed(1)}${item.note || ""}</span></div>`;
  });
  const ticks = [0, 1, 2, 3, 4].map(i => `<i style="left:${25 * i}%">${+(top * i / 4).toFixed(1)}</i>`).join("");
  return `<div class="bars">${lines.join("")}<div class="bar axis"><span class="label"></span><span class="track">${ticks}</span><span class="value"></span></div></div>`;
}

const legend = marks => marks.length ? `<p class="legend">${marks.map(mark => `<span><i class="mark" style="background:${mark.color}"></i> ${escape(mark.name)}</span>`).join("")}</p>` : "";

// The scale of several bars: the next 20 above the largest end.
function scaleOf(items) {
  const ends = items.flatMap(item => [item.value, item.interval ? item.interval[1] : null, ...(item.marks || []).map(mark => mark.at)]);
  return Math.min(100, Math.ceil(Math.max(10, ...ends.filter(end => end != null)) / 20) * 20);
}

// A curve: {name, color, points: [[x, y], ...]}. Drawn at the width that it has, so that its labels stay readable.
function drawCurves(box, curves, unit) {
  const width = Math.max(260, box.clientWidth), height = 200, left = 52, bottom = 26, right = 12;
  const xs = curves.flatMap(curve => curve.points.map(point => point[0])), ys = curves.flatMap(curve => curve.points.map(point => point[1]));
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (y0 === y1) [y0, y1] = [y0 - 1, y1 + 1];
  const X = x => left + (x - x0) / (x1 - x0 || 1) * (width - left - right), Y = y => 10 + (y1 - y) / (y1 - y0) * (height - bottom - 10);
  const short = value => Math.abs(value) >= 1e-2 || value === 0 ? +value.toFixed(2) : value.toExponential(1);
  let svg = "";
  for (let i = 0; i <= 3; i++) {
    const y = y0 + (y1 - y0) * i / 3, x = x0 + (x1 - x0) * i / 3;
    svg += `<line class="grid" x1="${left}" x2="${width - right}" y1="${Y(y)}" y2="${Y(y)}"/><text x="${left - 6}" y="${Y(y) + 4}" text-anchor="end">${short(y)}</text>`;
    svg += `<text x="${X(x)}" y="${height - 6}" text-anchor="${["start", "middle", "middle", "end"][i]}">${Math.round(x)}${i === 3 ? ` ${unit}` : ""}</text>`;
  }
  for (const curve of curves) {
    svg += `<path d="M${curve.points.map(([x, y]) => `${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("L")}" stroke="${curve.color}"/>`;
  }
  box.innerHTML = `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" role="img">${svg}</svg>`;
}
