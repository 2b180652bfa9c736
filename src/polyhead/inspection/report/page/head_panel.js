// The panel of the selected head: its roles, and its mean attention.

function drawHeadPanel() {
  const box = $("head-panel");
  if (state.cell && selectedLayer().display === "matrix") { drawWeightExplanation(box); return; }
  const layer = selectedLayer(), head = state.head, cards = cardsOfHead(layer, head);
  const parts = [htmlElement("div", { class: "head" }, htmlElement("h2", {}, htmlElement("span", { class: "name" }, selectedHeadName()), ` head ${layer.heads[head]} of layer ${layer.number}`))];
  parts.push(htmlElement("p", { class: "hint where" }, [layer.name, layer.kind === "graph" ? null : layer.attention, layer.over === "Dense()" || layer.kind === "graph" ? null : layer.over, layer.score === "Dot" ? null : `${layer.score} score`].filter(Boolean).join(" · ")));
  if (cards.length) parts.push(...cards.map(buildRoleCard));
  else if (record.cards.length || !layer.image) parts.push(htmlElement("p", { class: "norole" }, htmlElement("b", {}, "No role: "), record.cards.length ? "nothing stands out in this head." : "roles were not measured."));
  if (layer.kind === "graph") parts.push(...buildEdgeLists(layer, head));
  parts.push(...buildStatistics(layer, head));
  if (layer.image && layer.queries > layer.image.special[0]) parts.push(...buildOffsetMap(layer, head));
  box.replaceChildren(...parts);
}

function buildRoleCard(card) {
  const toCssPercent = (x) => `${(100 * Math.min(1, Math.max(0, x))).toFixed(1)}%`;
  const facts = [
    [formatNumber(card.score), `95 % interval ${formatNumber(card.low)}–${formatNumber(card.high)}`],
    [formatNumber(card.baseline), "baseline on the same cases"],
    [card.cases.toLocaleString("en"), `${card.cases === 1 ? "case" : "cases"}${card.measured_on ? ` in ${card.measured_on}` : ""}`],
    card.effect === null ? null : [formatSignedNumber(card.effect), "effect of removing the head"],
  ].filter(Boolean);
  return htmlElement("article", { class: "card", style: `--role:${roleColour(card.role)};--line:${roleLineStyle(card.role)}` },
    htmlElement("h3", {}, card.role, card.direction ? htmlElement("span", { class: "hint" }, ` ${card.direction}`) : null),
    record.roles[card.role] ? htmlElement("p", {}, record.roles[card.role]) : null,
    htmlElement("div", { class: "gauge", role: "img", "aria-label": `score ${formatNumber(card.score)}, baseline ${formatNumber(card.baseline)}` },
      htmlElement("span", { class: "reach", style: `left:${toCssPercent(card.low)};right:${toCssPercent(1 - card.high)}` }),
      htmlElement("span", { class: "base", style: `left:${toCssPercent(card.baseline)}`, title: "baseline" }),
      htmlElement("span", { class: "dot", style: `left:${toCssPercent(card.score)}`, title: "score" })),
    htmlElement("dl", {}, facts.flatMap(([value, name]) => [htmlElement("dt", {}, value), htmlElement("dd", {}, name)])),
    card.pair ? htmlElement("p", { class: "pair" }, "In this text: ", tokenElement(card.pair[0]), " → ", tokenElement(card.pair[1]), ` ${formatNumber(card.pair[2])}`) : null);
}

const formatSignedNumber = (x) => (Math.abs(x) < 5e-4 ? "0" : `${x > 0 ? "+" : "−"}${Math.abs(x).toFixed(Math.abs(x) < 0.1 ? 3 : 2)}`);

const TARGETS = [
  ["self", "itself", "Weight of a token on itself"],
  ["previous", "previous", "Weight on the token before it"],
  ["next", "next", "Weight on the token after it"],
  ["first", "first token", "Weight on the first token"],
  ["special", "special tokens", "Weight on tokens such as [CLS] and [SEP]"],
];

function buildStatistics(layer, head) {
  const { entropy, distance, weight, share } = layer.stats;
  const text = layer.columns === null ? null : record.texts[layer.columns];
  const special = text?.word_of.some((word) => word === null);
  const buildBar = (x, kind) => htmlElement("span", { class: `meter ${kind}`, style: `--long:${(100 * Math.min(1, x ?? 0)).toFixed(1)}%` });
  const rows = TARGETS.filter(([name]) => weight[name] && (name !== "special" || special) && (layer.kind !== "cross" || name === "first" || name === "special")).map(([name, label, help]) => {
    const w = weight[name][head], c = share[name]?.[head];
    return htmlElement("tr", { title: help }, htmlElement("th", { scope: "row" }, label), htmlElement("td", { class: "bars" }, buildBar(w, "w"), c === undefined ? null : buildBar(c, "c")),
      htmlElement("td", {}, formatPercent(w)), c === undefined ? null : htmlElement("td", { class: "c" }, formatPercent(c)));
  });
  // means are over patches: there are none if no query is a patch
  if (layer.image && entropy[head] === null) return [];
  const keys = Math.exp(entropy[head] ?? 0);
  const hasShares = Object.keys(share).length > 0;
  return [
    !rows.length ? "" : htmlElement("table", { class: "stats" }, htmlElement("caption", {}, layer.kind === "graph" ? "Mean attention of the nodes" : layer.image ? "Mean attention of the patches" : "Mean attention of the words"),
      htmlElement("thead", {}, htmlElement("tr", {}, htmlElement("td"), htmlElement("td"), htmlElement("th", { scope: "col", class: "w" }, "weight"), hasShares ? htmlElement("th", { scope: "col", class: "c" }, "contrib.") : null)),
      htmlElement("tbody", {}, rows)),
    htmlElement("dl", { class: "facts" },
      htmlElement("dt", {}, formatNumber(entropy[head])), htmlElement("dd", {}, `nats of entropy, like uniform attention over ${keys < 9.95 ? keys.toFixed(1) : Math.round(keys)} ${layer.kind === "graph" ? "nodes" : layer.image && !layer.image.special[1] ? "patches" : "tokens"}`),
      ...(layer.image ? buildImageFacts(layer, head) : distance && layer.kind === "self" ? [htmlElement("dt", {}, formatNumber(distance[head], 1)), htmlElement("dd", {}, "mean attention distance, in tokens")] : [])),
  ];
}

watch("layer head cell measure level hide theme node direction", (keys) => { if (!selectedLayer().image || [...keys].some((key) => key !== "node" && key !== "direction")) drawHeadPanel(); });
