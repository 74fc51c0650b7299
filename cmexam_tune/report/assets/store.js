// Questions and outputs. The index is unpacked at once, the texts block by block when they are looked at.

const Store = {
  ready: false,
  index: null,
  opened: new Map(),

  async unpack(packed) {
    if (typeof packed !== "string") return packed;  // a few questions are not packed
    const bytes = Uint8Array.from(atob(packed), character => character.charCodeAt(0));
    const stream = new Response(bytes).body.pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  },
  async open() {
    Store.index = await Store.unpack(R.index);
    Store.ready = true;
  },
  block(number) {
    if (!Store.opened.has(number)) Store.opened.set(number, Store.unpack(R.blocks[number]));
    return Store.opened.get(number);
  },
  async texts(i) {
    const [stem, options, reference, outputs, facts] = (await Store.block(Math.floor(i / R.block)))[i % R.block];
    return {stem, options, reference, outputs, facts};
  },
  state(i, run = 0) {
    const {gold, answers, right} = Store.index;
    return !answers[run][i] ? "unreadable" : gold[i] == null ? "unknown" : right[run][i] === "1" ? "right" : "wrong";
  },
  facets: () => Store.ready ? R.facets.map((name, i) => ({name, values: Store.index.values[i]})) : [],
  accuracy(run, facet, value) {
    let n = 0, right = 0;
    Store.index.of[facet].forEach((own, i) => {
      if (own !== value || Store.index.gold[i] == null) return;
      n += 1;
      right += Store.index.right[run][i] === "1";
    });
    return {n, accuracy: n ? 100 * right / n : 0};
  },
};
