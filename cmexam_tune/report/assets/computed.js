// Sections that are tables and bars as the report holds them: a row of `SECTIONS` in sections.py, no script of their own.

const wording = text => Array.isArray(text) ? both(escape(text[0]), escape(text[1])) : phrase(text);
const plainly = text => Array.isArray(text) ? word(...text) : text;

function computedTable({title, note, head, lines}, of) {
  const heading = title.length && wording(title) !== wording(of) ? `<h3>${wording(title)}</h3>` : "";
  return heading + table(head.map(wording), lines.map(cells => ({cells: cells.map(wording)})), {sortable: false}) +
    (note.length ? `<p class="soft">${wording(note)}</p>` : "");
}

function computedBars(items) {
  if (!items.length) return "";
  const names = [...new Set(items.flatMap(item => item.marks.map(mark => JSON.stringify(mark.name))))];
  const color = name => PALETTE[names.indexOf(JSON.stringify(name)) % PALETTE.length];
  const key = `<p class="legend">${names.map((name, i) => `<span><i class="mark" style="background:${PALETTE[i % PALETTE.length]}"></i> ${wording(JSON.parse(name))}</span>`).join("")}</p>`;
  const drawn = items.map(item => ({
    ...item, label: wording(item.label), kind: "own", marks: item.marks.map(({name, at}) => ({at, color: color(name), name: plainly(name)})),
  }));
  return (names.length ? key : "") + bars(drawn, scaleOf(drawn));
}

for (const {key, title, bars: items, tables} of R.sections) {
  section(key, escape(title[0]), escape(title[1]), computedBars(items) + tables.map(one => computedTable(one, title)).join(""));
}
