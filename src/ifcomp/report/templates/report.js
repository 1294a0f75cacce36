(() => {
  "use strict";

  const byId = (id) => document.getElementById(id);

  /* Create an element with attributes and children. Strings become text nodes and are never parsed as HTML. */
  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  /* Browsers may refuse storage, for instance in private windows. The page then works without it. */
  function stored(name) {
    try { return localStorage.getItem(name); } catch { return null; }
  }
  function store(name, value) {
    try { localStorage.setItem(name, value); return true; } catch { return false; }
  }

  // Light and dark --------------------------------------------------------------------------------------------------

  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const updateThemeButton = () => byId("theme").setAttribute("aria-pressed", isDark());
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    updateThemeButton();
  });
  prefersDark.addEventListener("change", updateThemeButton);
  updateThemeButton();

  if (!byId("data")) return;

  // Data ------------------------------------------------------------------------------------------------------------

  const data = JSON.parse(byId("data").textContent);
  const columns = data.columns;
  const hasComplexity = "label_complexity" in columns;
  for (const name of ["score", "p_label", "p_suggested", ...(hasComplexity ? ["label_complexity"] : [])]) {
    columns[name] = Float64Array.from(columns[name], (value) => (value === null ? NaN : Number(value)));
  }
  const total = columns.rank.length;
  const suspectCount = columns.is_suspect.reduce((sum, value) => sum + value, 0);
  const largestScore = columns.score.find((value) => Number.isFinite(value) && value > 0) || 1; // rows are ranked
  const classOrder = new Float64Array(data.classes.length);
  data.classes
    .map((name, position) => [name, position])
    .sort(([a], [b]) => a.localeCompare(b, undefined, { numeric: true }))
    .forEach(([, position], place) => { classOrder[position] = place; });
  const className = (label) => data.classes[label];
  const previewOf = (row) => data.previews[data.shown[columns.index[row]]];
  const searchTexts = new Map();
  for (let row = 0; row < total; row++) {
    const preview = previewOf(row);
    if (!preview) continue;
    const body = preview.kind === "text" ? preview.content : preview.kind === "row" ? preview.content.flat().join(" ") : "";
    searchTexts.set(row, `${preview.name} ${body}`.toLowerCase());
  }

  // Number formats --------------------------------------------------------------------------------------------------

  const formatInteger = (value) => value.toLocaleString("en-US");
  function formatProbability(value) {
    if (value < 0.001) return "<0.001";
    return value > 0.999 ? ">0.999" : value.toFixed(3);
  }
  function formatNumber(value) {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    if (size > 0 && size < 0.01) return value > 0 ? "<0.01" : ">−0.01";
    return size >= 1000 ? formatInteger(Math.round(value)) : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
  }
  const formatPrecisely = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(5))) : formatNumber(value));

  // Decisions -------------------------------------------------------------------------------------------------------

  const ACTIONS = [["keep", "Keep"], ["relabel", "Relabel"], ["drop", "Drop"]];
  const storageName = `ifcomp-report-${data.key}`;
  const decisions = new Map();
  const history = [];
  const rowOfIndex = new Map(columns.index.map((index, row) => [index, row]));

  function loadDecisions() {
    let entries = [];
    try { entries = Object.entries(JSON.parse(stored(storageName) || "{}")); } catch { /* damaged: start again */ }
    for (const [index, entry] of entries) {
      const row = rowOfIndex.get(Number(index));
      if (row === undefined || !ACTIONS.some(([action]) => action === entry.action)) continue;
      decisions.set(row, { action: entry.action, label: entry.label in data.classes ? entry.label : columns.suggested[row] });
    }
  }

  function saveDecisions() {
    const entries = [...decisions].map(([row, decision]) => [columns.index[row], decision]);
    return store(storageName, JSON.stringify(Object.fromEntries(entries)));
  }

  function setDecision(row, decision) {
    if (decision) decisions.set(row, decision);
    else decisions.delete(row);
    const isStored = saveDecisions();
    for (const node of document.querySelectorAll(`[data-row="${row}"]`)) paintDecision(node);
    updateProgress(isStored ? "" : " This browser does not store decisions: export before you close the page.");
  }

  /* Decide about one label. The same decision again removes it. */
  function decide(row, action, label = columns.suggested[row]) {
    const previous = decisions.get(row);
    const isSame = previous && previous.action === action && (action !== "relabel" || previous.label === label);
    history.push([row, previous]);
    setDecision(row, isSame ? undefined : { action, label });
  }

  function undo() {
    if (!history.length) return;
    const [row, previous] = history.pop();
    setDecision(row, previous);
    if (byId("details").open) {
      if (rows.includes(row)) openRow(row);
      return;
    }
    if (!rows.includes(row)) return;
    goToPage(Math.floor(rows.indexOf(row) / pageSize()));
    setCurrent(row, true);
  }

  function updateProgress(note = "") {
    const decidedSuspects = [...decisions.keys()].filter((row) => columns.is_suspect[row]).length;
    const others = decisions.size - decidedSuspects;
    const further = others ? `, and ${formatInteger(others)} other${others > 1 ? "s" : ""}` : "";
    const counts = ACTIONS.map(([action]) => [...decisions.values()].filter((decision) => decision.action === action).length);
    const shares = decisions.size ? `: ${counts[0]} kept, ${counts[1]} relabelled, ${counts[2]} dropped` : "";
    byId("progress").max = Math.max(1, suspectCount);
    byId("progress").value = decidedSuspects;
    byId("decided").textContent = `${formatInteger(decidedSuspects)} of ${formatInteger(suspectCount)} suspects decided${further}${shares}.${note}`;
    byId("undo").disabled = history.length === 0;
    byId("export").disabled = decisions.size === 0;
  }

  function decisionText(decision) {
    return decision.action === "relabel" ? `→ ${className(decision.label)}` : decision.action === "keep" ? "kept" : "dropped";
  }

  /* Show the decision of a card, a line of the table or the details. */
  function paintDecision(node) {
    const decision = decisions.get(Number(node.dataset.row));
    node.dataset.decision = decision ? decision.action : "";
    for (const button of node.querySelectorAll("button[data-action]")) {
      button.setAttribute("aria-pressed", Boolean(decision) && button.dataset.action === decision.action);
    }
    const stamp = node.querySelector(".stamp");
    if (stamp) stamp.textContent = decision ? decisionText(decision) : "";
    const select = node.querySelector("select");
    if (select && decision && decision.action === "relabel") select.value = decision.label;
  }

  function decisionButtons(row, chosenLabel = () => columns.suggested[row]) {
    const buttons = ACTIONS.map(([action, title]) => {
      const button = element("button", { type: "button", "data-action": action, "aria-pressed": "false" }, title);
      button.addEventListener("click", () => {
        setCurrent(row, false);
        decide(row, action, chosenLabel());
      });
      return button;
    });
    return element("div", { class: "decide", role: "group", "aria-label": `Decision about example ${columns.index[row]}` }, ...buttons);
  }

  // State: sort order, page and layout; rows that match the filters -------------------------------------------------

  const firstView = suspectCount ? "suspects" : "all";
  const state = { sort: "rank", descending: false, page: 0, current: -1, cards: true };
  let rows = [];

  function isShown(row, view) {
    if (view === "decided") return decisions.has(row);
    if (view === "all") return true;
    return Boolean(columns.is_suspect[row]) && !(view === "open" && decisions.has(row));
  }

  function filteredRows() {
    const view = byId("show").value, given = byId("given").value, suggested = byId("suggested").value;
    const query = byId("query").value.trim().toLowerCase();
    const named = data.classes.map((name) => name.toLowerCase().includes(query));
    const matches = [];
    for (let row = 0; row < total; row++) {
      const label = columns.label[row], other = columns.suggested[row];
      if (!isShown(row, view)) continue;
      if (given !== "" && label !== Number(given)) continue;
      if (suggested !== "" && other !== Number(suggested)) continue;
      if (query && !named[label] && !named[other] && String(columns.index[row]) !== query
        && !(searchTexts.get(row) || "").includes(query)) continue;
      matches.push(row);
    }
    return matches;
  }

  function sortedRows(matches) {
    const isClass = state.sort === "label" || state.sort === "suggested";
    const column = columns[state.sort];
    const sign = state.descending ? -1 : 1;
    const key = (row) => {
      const value = isClass ? classOrder[column[row]] : column[row];
      return Number.isNaN(value) ? Infinity : sign * value;
    };
    const keys = new Float64Array(total);
    for (const row of matches) keys[row] = key(row);
    return matches.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
  }

  const pageSize = () => Number(byId("size").value);
  const pageCount = () => Math.max(1, Math.ceil(rows.length / pageSize()));
  const pageRows = () => rows.slice(state.page * pageSize(), (state.page + 1) * pageSize());

  function refresh() {
    rows = sortedRows(filteredRows());
    goToPage(0);
  }

  // Cards and table -------------------------------------------------------------------------------------------------

  function previewElement(preview, large) {
    if (!preview) return element("span", { class: "nothing", "aria-hidden": "true" });
    if (preview.kind === "image") {
      return element("img", { class: "thumb", src: preview.content, alt: preview.name, decoding: "async" });
    }
    if (preview.kind === "text") return element("p", { class: large ? "excerpt full" : "excerpt", dir: "auto" }, preview.content);
    const fields = large ? preview.content : preview.content.slice(0, 4);
    const items = fields.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
    return element("dl", { class: "fields" }, ...items);
  }

  const bdi = (text, kind = "") => element("bdi", { class: kind, title: text }, text);

  function caption(row) {
    const preview = previewOf(row);
    const index = columns.index[row];
    const name = preview && preview.name && preview.name !== `row ${index}` ? [bdi(preview.name, "name")] : [];
    return element("span", { class: "caption" }, ...name, element("span", { class: "number" }, `#${index}`));
  }

  function whyButton(row) {
    const button = element("button", { type: "button", class: "why", "aria-label": `Why example ${columns.index[row]}` }, "Why");
    button.addEventListener("click", () => openDetails(row));
    return button;
  }

  function suspicion(row) {
    const bar = level(columns.score[row] / largestScore);
    return element("div", { class: "suspicion" }, element("span", {}, "Suspicion"), bar, element("span", { class: "value" }, formatNumber(columns.score[row])));
  }

  function cardItem(row) {
    const labels = element("dl", { class: "labels" },
      element("dt", {}, "Given"), element("dd", { class: "label" }, bdi(className(columns.label[row]))),
      element("dt", {}, "Suggested"), element("dd", { class: "suggested" }, bdi(className(columns.suggested[row]))));
    const summary = `Example ${columns.index[row]}, given ${className(columns.label[row])}, suggested `
      + `${className(columns.suggested[row])}, suspicion ${formatNumber(columns.score[row])}`;
    const card = element("li", { class: "card", tabindex: "-1", "data-row": row, "aria-label": summary },
      element("div", { class: "picture" }, previewElement(previewOf(row), false), element("span", { class: "stamp" })),
      labels, suspicion(row), decisionButtons(row), element("div", { class: "foot" }, caption(row), whyButton(row)));
    return card;
  }

  const headers = [...document.querySelectorAll("#table th[data-column]")];
  const cell = (name, ...children) => element("td", { class: name }, ...children);

  function tableRow(row) {
    return element("tr", { "data-row": row, tabindex: "-1" },
      cell("rank", formatInteger(columns.rank[row])),
      cell("index", element("div", { class: "example" }, previewElement(previewOf(row), false), caption(row))),
      cell("label", bdi(className(columns.label[row]))),
      cell("suggested", bdi(className(columns.suggested[row]))),
      cell("p_label", formatProbability(columns.p_label[row])),
      cell("p_suggested", formatProbability(columns.p_suggested[row])),
      cell("score", formatNumber(columns.score[row])),
      ...(hasComplexity ? [cell("label_complexity", formatNumber(columns.label_complexity[row]))] : []),
      cell("decision", decisionButtons(row), element("span", { class: "stamp" })),
      cell("open", whyButton(row)));
  }

  function renderPage() {
    const visible = pageRows(), start = state.page * pageSize(), pages = pageCount();
    byId("cards").replaceChildren(...(state.cards ? visible.map(cardItem) : []));
    byId("rows").replaceChildren(...(state.cards ? [] : visible.map(tableRow)));
    for (const node of document.querySelectorAll("#labels [data-row]")) paintDecision(node);
    byId("status").textContent = rows.length
      ? `Showing ${formatInteger(start + 1)} to ${formatInteger(start + visible.length)} of ${formatInteger(rows.length)} `
        + `labels, page ${formatInteger(state.page + 1)} of ${formatInteger(pages)}.`
      : "No label matches. Reset the filters to see all.";
    byId("page").value = state.page + 1;
    byId("page").max = pages;
    byId("of").textContent = `of ${formatInteger(pages)}`;
    byId("first").disabled = byId("previous").disabled = state.page === 0;
    byId("last").disabled = byId("next").disabled = state.page === pages - 1;
    setCurrent(visible.includes(state.current) ? state.current : visible[0], false);
    updateControls();
  }

  function updateControls() {
    for (const header of headers) {
      if (header.dataset.column !== state.sort) header.removeAttribute("aria-sort");
      else header.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
    }
    byId("sort").value = state.sort;
    byId("direction").textContent = state.descending ? "↓ Descending" : "↑ Ascending";
    byId("as-cards").setAttribute("aria-pressed", state.cards);
    byId("as-table").setAttribute("aria-pressed", !state.cards);
    byId("cards").hidden = !state.cards;
    byId("table-region").hidden = state.cards;
    for (const chip of document.querySelectorAll(".chip")) {
      chip.setAttribute("aria-pressed", chip.dataset.given === byId("given").value && chip.dataset.suggested === byId("suggested").value);
    }
  }

  function goToPage(page) {
    state.page = Math.min(Math.max(0, page), pageCount() - 1);
    renderPage();
  }

  function setLayout(cards) {
    state.cards = cards;
    renderPage();
  }

  // The current label, which the keys decide about ------------------------------------------------------------------

  const lineOf = (row) => document.querySelector(`#labels :is(.card, tr)[data-row="${row}"]`);

  function setCurrent(row, focus) {
    state.current = row === undefined ? -1 : row;
    for (const node of document.querySelectorAll("#labels .current")) node.classList.remove("current");
    const line = lineOf(state.current);
    if (!line) return;
    line.classList.add("current");
    if (focus) line.focus();
  }

  function moveCurrent(by) {
    const place = rows.indexOf(state.current) + by;
    if (place < 0 || place >= rows.length) return;
    const page = Math.floor(place / pageSize());
    if (page !== state.page) goToPage(page);
    setCurrent(rows[place], true);
  }

  /* The keys work outside of fields, and can be turned off for screen readers and voice control. */
  function onKey(event) {
    if (!byId("keys").checked || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("select, textarea, input:not([type=checkbox])")) return;
    const isOpen = byId("details").open;
    const move = isOpen ? step : moveCurrent;
    const action = ACTIONS[Number(event.key) - 1];
    const key = event.key.toLowerCase();
    if (action && state.current >= 0) {
      decide(state.current, action[0], isOpen ? chosenLabel() : undefined);
      if (decisions.has(state.current)) move(1);
    } else if (key === "arrowleft" || key === "arrowright") move(key === "arrowleft" ? -1 : 1);
    else if (key === "u") undo();
    else if (key === "w" && !isOpen && state.current >= 0) openDetails(state.current);
    else return;
    event.preventDefault();
  }

  // Details: why a label is suspicious ------------------------------------------------------------------------------

  function openRow(row) {
    setCurrent(row, false);
    renderDetails(row);
  }

  function openDetails(row) {
    openRow(row);
    byId("details").showModal();
    byId("details-heading").focus();
  }

  function step(by) {
    const place = rows.indexOf(state.current) + by;
    if (place < 0 || place >= rows.length) return;
    const page = Math.floor(place / pageSize());
    if (page !== state.page) goToPage(page);
    openRow(rows[place]);
  }

  const chosenLabel = () => Number(byId("new-label").value);

  function renderDetails(row) {
    const index = columns.index[row];
    const given = className(columns.label[row]), suggested = className(columns.suggested[row]);
    const preview = previewOf(row);
    byId("details-heading").textContent = `Example ${index}`;
    byId("details-previous").disabled = rows.indexOf(row) <= 0;
    byId("details-next").disabled = rows.indexOf(row) === rows.length - 1;
    const verdict = element("p", { class: "verdict" }, "Labelled ", bdi(given, "label"), ", looks like ", bdi(suggested, "suggested"), ".");
    const name = preview && preview.name ? [element("p", { class: "caption" }, bdi(preview.name))] : [];
    const head = element("div", { class: "large" }, ...(preview ? [previewElement(preview, true)] : []), element("div", {}, ...name, verdict));
    byId("details-body").replaceChildren(head, probabilities(row), ...neighbourLists(row), ...explanationLists(index), factList(row));
    byId("details-body").scrollTop = 0;
    renderDecision(row);
  }

  function renderDecision(row) {
    const options = data.classes.map((name, label) => element("option", { value: label }, name));
    const select = element("select", { id: "new-label" }, ...options);
    select.value = columns.suggested[row];
    select.addEventListener("change", () => {
      const decision = decisions.get(row);
      if (!decision || decision.action !== "relabel" || decision.label !== chosenLabel()) decide(row, "relabel", chosenLabel());
    });
    byId("details-decision").dataset.row = row;
    byId("details-decision").replaceChildren(decisionButtons(row, chosenLabel), element("label", {}, "New label ", select));
    paintDecision(byId("details-decision"));
  }

  /* A bar whose length is a share between 0 and 1. */
  function level(share) {
    const bar = element("span", { class: "level", "aria-hidden": "true" }, element("span"));
    bar.firstChild.style.width = `${100 * Math.max(0, Math.min(1, share || 0))}%`;
    return bar;
  }

  function probabilities(row) {
    const line = (label, value, kind) => [
      element("dt", {}, bdi(className(label), kind)),
      element("dd", {}, level(value), element("span", { class: "value" }, formatProbability(value))),
    ];
    return element("div", {}, element("h3", {}, "What the layers predict together"),
      element("dl", { class: "bars" },
        ...line(columns.suggested[row], columns.p_suggested[row], "suggested"),
        ...line(columns.label[row], columns.p_label[row], "label")));
  }

  function factList(row) {
    const list = element("dl", { class: "facts" });
    const add = (name, value) => list.append(element("dt", {}, name), element("dd", {}, value));
    add("rank", formatInteger(columns.rank[row]));
    add("suspicion", `${formatPrecisely(columns.score[row])} nats`);
    add("probability of the given label", formatPrecisely(columns.p_label[row]));
    add("probability of the suggested label", formatPrecisely(columns.p_suggested[row]));
    if (hasComplexity) add("label complexity", `${formatPrecisely(columns.label_complexity[row])} nats`);
    add("suspect", columns.is_suspect[row] ? "yes" : "no");
    return element("details", { class: "numbers" }, element("summary", {}, "All numbers"), list);
  }

  function neighbourLists(row) {
    const given = columns.label[row];
    const layers = data.neighbours[columns.index[row]];
    if (!layers) return [element("p", { class: "note" }, "The nearest examples of this label are not in this report.")];
    return layers.flatMap(([layer, weight, examples, labels]) => {
      const others = labels.filter((label) => label !== given).length;
      return [
        element("h3", {}, "Nearest in layer ", bdi(layer)),
        element("p", { class: "note" }, `${others} of the ${labels.length} nearest have another label; the votes of this layer have weight ${weight.toFixed(2)}.`),
        element("ul", { class: "examples neighbours" }, ...examples.map(([position, label, preview]) => (
          element("li", { class: label === given ? "" : "contradicts" }, previewElement(data.previews[preview], false), exampleCaption(label, position))))),
      ];
    });
  }

  const exampleCaption = (label, position) => (
    element("span", {}, bdi(className(label), "label"), element("span", { class: "number" }, ` #${position}`)));

  function explanationLists(index) {
    const examples = (data.explanations[index] || []).map(([position, influence, label, preview]) => (
      { position, influence: Number(influence), label, preview: data.previews[preview] }));
    const strongest = Math.max(...examples.map((example) => Math.abs(example.influence)));
    const group = (title, kind, chosen) => (chosen.length
      ? [element("h3", {}, title), element("ul", { class: `examples ${kind}` }, ...chosen.map((example) => trainingExampleItem(example, strongest)))]
      : []);
    const byStrength = examples.sort((a, b) => Math.abs(b.influence) - Math.abs(a.influence));
    return [
      ...group("Training examples that contradict the given label", "contradicting", byStrength.filter((example) => example.influence < 0)),
      ...group("Training examples that support it", "supporting", byStrength.filter((example) => example.influence > 0)),
    ];
  }

  function trainingExampleItem(example, strongest) {
    return element("li", {},
      previewElement(example.preview, false),
      exampleCaption(example.label, example.position),
      element("span", { class: "influence" }, `influence ${example.influence > 0 ? "+" : ""}${Number(example.influence.toPrecision(3))}`),
      level(Math.abs(example.influence) / strongest));
  }

  // Export ----------------------------------------------------------------------------------------------------------

  const CONTROL_NAMES = { "\t": "\\t", "\n": "\\n", "\r": "\\r" };

  function escapeControl(character) {
    const code = character.charCodeAt(0).toString(16);
    return CONTROL_NAMES[character] ?? (code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`);
  }

  /* Spreadsheets evaluate text that starts like a formula, also after a semicolon, which may separate cells. An
     apostrophe before it prevents that. `ifcomp apply` understands it and the escaped control characters. */
  function csvField(text) {
    const guarded = /^[+-]?\d+(\.\d+)?$/.test(text) ? text : text.replace(/(^|;)(?=\s*[=+\-@\uFF1D\uFF0B\uFF0D\uFF20])/g, "$1'");
    const safe = guarded.replace(/[\x00-\x1F\x7F-\x9F\u2028\u2029]/g, escapeControl);
    return /[",]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  function decisionsText() {
    const decided = [...decisions].sort(([a], [b]) => columns.index[a] - columns.index[b]);
    const lines = decided.map(([row, { action, label }]) => (
      [columns.index[row], action, action === "relabel" ? csvField(className(label)) : ""].join(",")));
    return `${["index,decision,label", ...lines].join("\r\n")}\r\n`;
  }

  function download() {
    const address = URL.createObjectURL(new Blob([decisionsText()], { type: "text/csv" }));
    element("a", { href: address, download: "decisions.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  // Event handlers --------------------------------------------------------------------------------------------------

  function sortBy(name) {
    state.descending = state.sort === name ? !state.descending : !["rank", "index", "label", "suggested"].includes(name);
    state.sort = name;
    refresh();
  }

  function reset() {
    byId("controls").reset();
    byId("show").value = firstView;
    Object.assign(state, { sort: "rank", descending: false });
    refresh();
  }

  let waiting = 0;
  byId("query").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(refresh, 150);
  });
  for (const id of ["show", "given", "suggested"]) byId(id).addEventListener("change", refresh);
  for (const chip of document.querySelectorAll(".chip")) {
    chip.addEventListener("click", () => {
      const chosen = chip.getAttribute("aria-pressed") === "true";
      byId("given").value = chosen ? "" : chip.dataset.given;
      byId("suggested").value = chosen ? "" : chip.dataset.suggested;
      refresh();
    });
  }
  for (const header of headers) {
    header.firstElementChild.addEventListener("click", () => sortBy(header.dataset.column));
  }
  byId("sort").addEventListener("change", () => sortBy(byId("sort").value));
  byId("direction").addEventListener("click", () => sortBy(state.sort));
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("clear").addEventListener("click", reset);
  byId("as-cards").addEventListener("click", () => setLayout(true));
  byId("as-table").addEventListener("click", () => setLayout(false));
  byId("undo").addEventListener("click", undo);
  byId("export").addEventListener("click", download);
  byId("first").addEventListener("click", () => goToPage(0));
  byId("previous").addEventListener("click", () => goToPage(state.page - 1));
  byId("next").addEventListener("click", () => goToPage(state.page + 1));
  byId("last").addEventListener("click", () => goToPage(pageCount() - 1));
  byId("page").addEventListener("change", () => goToPage((Number(byId("page").value) || 1) - 1));
  byId("size").addEventListener("change", () => goToPage(0));
  byId("details-previous").addEventListener("click", () => step(-1));
  byId("details-next").addEventListener("click", () => step(1));
  byId("details-close").addEventListener("click", () => byId("details").close());
  byId("details").addEventListener("click", (event) => { if (event.target === byId("details")) byId("details").close(); });
  byId("details").addEventListener("close", () => setCurrent(state.current, true));
  byId("labels").addEventListener("focusin", (event) => {
    const line = event.target.closest(".card, tbody tr");
    if (line && Number(line.dataset.row) !== state.current) setCurrent(Number(line.dataset.row), false);
  });
  document.addEventListener("keydown", onKey);
  loadDecisions();
  updateProgress();
  reset();
})();
