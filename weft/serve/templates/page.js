// The page: pictures in, answers out, a session's history.

const AT_ONCE = 3; // requests under way
const KEPT = 40; // pictures that survive a reload
const THUMB = 640; // pixels of the longer side of a picture that is kept
const $ = id => document.getElementById(id);
const state = { models: [], limits: { bytes: Infinity, seconds: 30 }, items: [], current: null, busy: 0, away: false, token: "", next: 1 };

function make(tag, properties = {}, ...children) {
  const { dataset, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(dataset ?? {})) element.dataset[name] = value;
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

const percent = value => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
const tell = text => { $("status").textContent = text; };
const modelOf = name => state.models.find(model => model.name === name);
const chosen = () => [$("model").value, $("beside").value].filter((name, i, all) => name && all.indexOf(name) === i);

// The server -------------------------------------------------------------------------------------------------------

class Away extends Error {}

/** A request with progress; resolves with the status and the answer, rejects with Away where there is no server. */
function request(method, path, body = null, onProgress = null) {
  return new Promise((resolve, reject) => {
    const call = new XMLHttpRequest();
    call.open(method, path);
    call.timeout = 1000 * (2 * state.limits.seconds + 5);
    call.responseType = path.startsWith("/samples/") ? "blob" : "text";
    if (state.token) call.setRequestHeader("Authorization", `Bearer ${state.token}`);
    if (onProgress) call.upload.onprogress = event => onProgress(event.lengthComputable ? event.loaded / event.total : 0);
    call.onload = () => resolve({ status: call.status, told: call.responseType === "blob" ? call.response : parsed(call), retry: +call.getResponseHeader("Retry-After") || 1 });
    call.onerror = call.ontimeout = call.onabort = () => reject(new Away());
    call.send(body);
  });
}

function parsed(call) {
  try { return JSON.parse(call.responseText); } catch { return { error: `The server answered ${call.status}.` }; }
}

const pause = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));

/** Waits until the server is there again, and says so meanwhile. */
async function waitForServer() {
  if (state.away) return;
  state.away = true;
  $("away").hidden = false;
  $("away").textContent = "The server does not answer. Trying again; your pictures wait here.";
  for (let wait = 500; ; wait = Math.min(5000, 1.5 * wait)) {
    await pause(wait);
    try {
      if ((await request("GET", "/ready")).status === 200) break;
    } catch (error) { if (!(error instanceof Away)) throw error; }
  }
  state.away = false;
  $("away").hidden = true;
  tell("The server is back.");
  if (!state.models.length) await begin(); else work();
}

// Pictures that come in --------------------------------------------------------------------------------------------

function take(files) {
  const pictures = [...files].filter(file => file.size || file.type);
  if (!pictures.length) return;
  for (const file of pictures) add(file, file.name || "pasted picture");
  state.current = state.items[state.items.length - pictures.length].id;
  show();
  work();
}

function add(file, name) {
  const item = { id: state.next++, name, file, answers: {}, progress: {}, views: {}, picture: null, thumb: "" };
  if (file.size > state.limits.bytes) {
    item.refused = `larger than ${(state.limits.bytes / 2 ** 20).toFixed(0)} MB, the most that the server takes`;
  }
  state.items.push(item);
  item.ready = preview(item);
}

/** The picture as the browser sees it, and a smaller copy to keep. Not every format can be shown. */
async function preview(item) {
  try {
    item.picture = await createImageBitmap(item.file);
    const scale = Math.min(1, THUMB / Math.max(item.picture.width, item.picture.height));
    const canvas = make("canvas", { width: Math.ceil(item.picture.width * scale), height: Math.ceil(item.picture.height * scale) });
    canvas.getContext("2d").drawImage(item.picture, 0, 0, canvas.width, canvas.height);
    item.thumb = canvas.toDataURL(Math.max(canvas.width, canvas.height) < 256 ? "image/png" : "image/jpeg", 0.85);
  } catch { item.picture = null; }
  render(item);
}

/** Sends what has no answer yet, a few at a time. */
function work() {
  if (state.away) return;
  for (const name of chosen())
    for (const item of state.items) {
      if (state.busy >= AT_ONCE) return;
      if (item.answers[name] || item.progress[name] !== undefined) continue;
      if (item.refused || !item.file) {
        item.answers[name] = { error: item.refused ?? "no longer here: it was sent before the page was loaded again" };
        render(item);
      } else ask(item, name);
    }
}

async function ask(item, name) {
  state.busy++;
  item.progress[name] = 0;
  try {
    item.answers[name] = await answerTo(item, name);
    if (item.id === state.current) tell(`${item.name}: ${summary(item, name).text}`);
    keep();
  } catch (error) {
    if (!(error instanceof Away)) throw error;
    waitForServer();
  } finally {
    delete item.progress[name];
    state.busy--;
    render(item);
    work();
  }
}

async function answerTo(item, name) {
  const path = `/predict?model=${encodeURIComponent(name)}&top=5&score=0.05`;
  for (let tries = 0; ; tries++) {
    const { status, told, retry } = await request("POST", path, item.file, part => {
      item.progress[name] = part;
      render(item);
    });
    if (status === 503 && tries < 20) { await pause(1000 * retry); continue; }
    if (status === 401) { $("ask").hidden = false; $("token").focus(); }
    return status === 200 ? told.pictures[0] : { error: told.error };
  }
}

// What is shown ----------------------------------------------------------------------------------------------------

/** The switches of one picture and one model. */
function viewOf(item, name) {
  if (!item.views[name]) {
    const model = modelOf(name);
    const shown = new Set(model.classes.keys());
    for (const plain of model.background) shown.delete(plain);
    item.views[name] = { shown, alpha: 0.5, score: 0.5, classes: null, why: null };
  }
  return item.views[name];
}

/** An answer in a few words. */
function summary(item, name) {
  const told = item.answers[name];
  if (!told) return { text: "…", bad: false };
  if (told.error) return { text: told.error, bad: true };
  if (told.labels) return { text: `${told.labels[0]} ${percent(told.probabilities[0])}`, bad: false };
  if (told.shares) {
    const [label, part] = Object.entries(told.shares).find(([one]) => !modelOf(name).background.includes(modelOf(name).classes.indexOf(one))) ?? ["nothing", 1];
    return { text: `${label} ${percent(part)}`, bad: false };
  }
  const sure = told.objects.filter(one => one.score >= 0.5).length;
  return { text: `${sure} ${sure === 1 ? "object" : "objects"}`, bad: false };
}

function render(item) {
  if (item.id === state.current) show(); else showHistory();
}

function show() {
  $("drop").classList.toggle("less", state.items.length > 0);
  showHistory();
  const item = state.items.find(one => one.id === state.current), names = chosen();
  $("stage").hidden = !item;
  $("stage").classList.toggle("two", names.length > 1);
  if (!item) return $("stage").replaceChildren();
  const focused = document.activeElement?.dataset?.key;
  $("stage").replaceChildren(...names.map(name => card(item, name)));
  if (focused) $("stage").querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function card(item, name) {
  const model = modelOf(name), told = item.answers[name], view = viewOf(item, name);
  const canvas = make("canvas", { dataset: { name } });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${item.name}: ${summary(item, name).text}`);
  const answer = told && !told.error ? told : null;
  paint(canvas, item.picture, answer, model, view);
  if (answer?.mask && !view.classes)
    readMask(answer, model).then(classes => { view.classes = classes; paint(canvas, item.picture, answer, model, view); });
  const frame = make("div", { className: "frame" }, canvas);
  if (!told) frame.append(waits(item, name));
  const notes = [item.name, answer?.size ? `${answer.size[1]} × ${answer.size[0]}` : null, ...(told?.notes ?? [])];
  const under = make("p", { className: "under" }, notes.filter(Boolean).join(" · "));
  if (!item.picture && item.file) under.append(" · this browser cannot show the file");
  const left = make("div", {}, frame, under);
  const right = make("div", {});
  if (told?.error) right.append(make("p", { className: "problem" }, told.error[0].toUpperCase() + told.error.slice(1) + "."));
  if (answer?.labels) right.append(bars(answer));
  const repaint = () => paint(canvas, item.picture, answer, model, view);
  if (answer?.shares) right.append(switches(model, view, Object.entries(answer.shares).map(([one, part]) => [model.classes.indexOf(one), percent(part), part]), repaint));
  if (answer?.objects) right.append(...objectTools(model, view, answer, repaint));
  if (answer) right.append(actions(item, name, canvas, answer, view, repaint));
  const head = make("h2", { id: `view-${name}` }, name, " ", make("span", { className: "soft" }, `${model.architecture}, ${(model.parameters / 1e6).toFixed(1)} M parameters`));
  const whole = make("section", { className: "card view" }, head, make("div", { className: "inside" }, left, right));
  whole.setAttribute("aria-labelledby", head.id);
  if (view.why) whole.append(whyPanel(item, name, view));
  return whole;
}

function waits(item, name) {
  const part = item.progress[name];
  const text = state.away ? "Waiting for the server" : part === undefined ? "Waiting" : part < 1 ? `Sending, ${Math.round(100 * part)} %` : "Looking at it";
  const bar = make("progress", part === undefined || part >= 1 ? {} : { value: part });
  bar.setAttribute("aria-label", text);
  return make("div", { className: "waits" }, text, bar);
}

function bars(answer) {
  return make("ol", { className: "bars" }, ...answer.labels.map((label, i) => {
    const fill = make("i");
    fill.style.width = percent(answer.probabilities[i]).replace(" ", "");
    return make("li", {}, make("span", { className: "name" }, label), make("span", { className: "value" }, percent(answer.probabilities[i])), make("span", { className: "bar" }, fill));
  }));
}

/** A switch for each class: [position, what is said beside it, the length of its bar]. */
function switches(model, view, rows, repaint) {
  return make("ul", { className: "bars" }, ...rows.map(([position, said, part]) => {
    const box = make("input", { type: "checkbox", checked: view.shown.has(position), dataset: { key: `class-${model.name}-${position}` } });
    box.onchange = () => { box.checked ? view.shown.add(position) : view.shown.delete(position); repaint(); };
    const dot = make("span", { className: "dot" });
    dot.style.background = model.colours[position];
    const fill = make("i");
    fill.style.width = `${100 * part}%`;
    fill.style.background = model.colours[position];
    const label = make("label", {}, box, dot, make("span", { className: "name" }, model.classes[position]));
    return make("li", {}, label, make("span", { className: "value" }, said), make("span", { className: "bar" }, fill));
  }));
}

function objectTools(model, view, answer, repaint) {
  const list = make("div", {});
  const fill = () => {
    const sure = answer.objects.filter(one => one.score >= view.score);
    const counts = new Map();
    for (const one of sure) counts.set(one.category_id - 1, (counts.get(one.category_id - 1) ?? 0) + 1);
    const most = Math.max(1, ...counts.values());
    const rows = [...counts].sort((a, b) => b[1] - a[1]).map(([position, n]) => [position, String(n), n / most]);
    list.replaceChildren(rows.length ? switches(model, view, rows, repaint) : make("p", { className: "soft" }, "Nothing that the model is so sure of."));
  };
  fill();
  const range = slider("at least so sure", view.score, value => { view.score = value; fill(); repaint(); }, `score-${model.name}`);
  return [list, make("div", { className: "tools row" }, range)];
}

function slider(text, value, change, key) {
  const input = make("input", { type: "range", min: 0, max: 1, step: 0.05, value, dataset: { key } });
  input.oninput = () => change(Number(input.value));
  return make("label", { className: "row" }, text, input);
}

function actions(item, name, canvas, answer, view, repaint) {
  const row = make("div", { className: "actions row" });
  if (answer.mask || answer.objects) row.append(slider("opacity", view.alpha, value => { view.alpha = value; repaint(); }, `alpha-${name}`));
  if (item.file) {
    const why = make("button", { type: "button", className: "main", dataset: { key: `why-${name}` } }, view.why ? "Hide why" : "Why?");
    why.onclick = () => view.why ? (view.why = null, show()) : explain(item, name, "");
    row.append(why);
  }
  const png = make("button", { type: "button", className: "plain", dataset: { key: `png-${name}` } }, "Save PNG");
  png.setAttribute("aria-label", `Save PNG of ${item.name} with its overlay`);
  png.onclick = () => canvas.toBlob(blob => save(`${item.name.replace(/\.[^.]*$/, "")}.overlay.png`, blob));
  row.append(png);
  return row;
}

// Why --------------------------------------------------------------------------------------------------------------

async function explain(item, name, of) {
  const view = viewOf(item, name);
  view.why = { waiting: true, tab: view.why?.tab ?? 0, strength: 1 };
  show();
  try {
    const { status, told } = await request("POST", `/explain?model=${encodeURIComponent(name)}&of=${encodeURIComponent(of)}`, item.file);
    view.why = { ...view.why, waiting: false, told: status === 200 ? told : null, error: told.error };
    tell(status === 200 ? `Why ${told.of || item.name}: ${told.sheets.map(sheet => sheet.title).join(", ")}` : told.error);
  } catch (error) {
    if (!(error instanceof Away)) throw error;
    view.why = null;
    waitForServer();
  }
  if (item.id === state.current) show();
}

function whyPanel(item, name, view) {
  const { waiting, told, error } = view.why, model = modelOf(name);
  const panel = make("div", { className: "why" });
  if (waiting) panel.append(make("p", { className: "soft" }, "Looking inside …"));
  if (error) panel.append(make("p", { className: "problem" }, error));
  if (!told) return panel;
  const sheets = told.sheets, tab = Math.min(view.why.tab, sheets.length - 1);
  const tabs = make("div", { className: "tabs" }, ...sheets.map((sheet, i) => tabButton(sheet, i, tab, view, name)));
  tabs.setAttribute("role", "tablist");
  tabs.setAttribute("aria-label", "Ways to look inside");
  panel.append(tabs);
  if (sheets[tab]) panel.append(sheetPanel(sheets[tab], told, view, model, item, name, tab));
  if (told.notes.length) panel.append(make("p", { className: "under" }, told.notes.join(" ")));
  return panel;
}

function tabButton(sheet, number, current, view, name) {
  const button = make("button", { type: "button", id: `tab-${name}-${number}`, tabIndex: number === current ? 0 : -1, dataset: { key: `tab-${name}-${number}` } }, sheet.title);
  button.setAttribute("role", "tab");
  button.setAttribute("aria-selected", String(number === current));
  button.setAttribute("aria-controls", `sheet-${name}`);
  const go = to => { view.why.tab = to; show(); $(`tab-${name}-${to}`)?.focus(); };
  button.onclick = () => go(number);
  button.onkeydown = event => {
    const last = button.parentElement.children.length - 1;
    const to = { ArrowRight: Math.min(last, number + 1), ArrowLeft: Math.max(0, number - 1), Home: 0, End: last }[event.key];
    if (to !== undefined) { event.preventDefault(); event.stopPropagation(); go(to); }
  };
  return button;
}

function sheetPanel(sheet, told, view, model, item, name, tab) {
  const body = make("div", { id: `sheet-${name}`, tabIndex: 0 });
  body.setAttribute("role", "tabpanel");
  body.setAttribute("aria-labelledby", `tab-${name}-${tab}`);
  body.append(make("p", { className: "reading" }, sheet.reading));
  const tools = make("div", { className: "row", style: "margin-bottom: 14px" });
  tools.append(slider("strength", view.why.strength, value => {
    view.why.strength = value;
    for (const image of body.querySelectorAll("img + img")) image.style.opacity = value;
  }, `strength-${name}`));
  if (sheet.kind === "grad-cam" && told.of) {
    const select = make("select", { id: `of-${name}`, dataset: { key: `of-${name}` } }, ...model.classes.map(one => make("option", { value: one, selected: one === told.of }, one)));
    select.onchange = () => explain(item, name, select.value);
    tools.append(make("label", { htmlFor: select.id }, "for the class"), select);
  }
  body.append(tools, make("div", { className: "sheet" }, ...sheet.rows.map(row => sheetRow(row, sheet, told, view))));
  return body;
}

function sheetRow(row, sheet, told, view) {
  const single = sheet.kind === "grad-cam" || sheet.kind === "rollout";
  const panels = row.panels.filter((panel, i) => !(single && i === 0) && panel.caption !== "picture");
  const box = make("div", { className: single ? "panels large" : "panels" }, ...panels.map(panel => {
    const above = make("img", { src: panel.picture, alt: `${sheet.title}: ${panel.caption}` });
    above.style.opacity = view.why.strength;
    return make("figure", {}, make("div", { className: "pair" }, make("img", { src: told.picture, alt: "" }), above), make("figcaption", {}, panel.caption));
  }));
  return make("div", {}, single ? null : make("h3", {}, row.name.replace("\n", ", ")), box);
}

// The session ------------------------------------------------------------------------------------------------------

function showHistory() {
  $("session").hidden = !state.items.length;
  const names = chosen();
  $("coco").hidden = !state.items.some(item => names.some(name => item.answers[name]?.size));
  const focused = document.activeElement?.dataset?.item;
  $("history").replaceChildren(...[...state.items].reverse().map(item => {
    const said = names.map(name => summary(item, name));
    const button = make("button", { type: "button", dataset: { item: item.id } });
    if (item.id === state.current) button.setAttribute("aria-current", "true");
    button.append(
      item.thumb ? make("img", { src: item.thumb, alt: "" }) : make("span", { className: "none" }, "no preview"),
      ...said.map(one => make("b", { className: one.bad ? "bad" : "" }, one.text)),
      make("span", { className: "file" }, item.name));
    button.onclick = () => { state.current = item.id; show(); $("stage").scrollIntoView({ block: "nearest" }); };
    return make("li", {}, button);
  }));
  if (focused) $("history").querySelector(`[data-item="${focused}"]`)?.focus();
}

/** Keeps the session in this tab, so that a reload does not lose it; the oldest go first where there is no room. */
function keep() {
  for (let first = Math.max(0, state.items.length - KEPT); first <= state.items.length; first += 5) {
    const rows = state.items.slice(first).map(({ id, name, thumb, answers }) => ({ id, name, thumb, answers }));
    try { return sessionStorage.setItem("weft", JSON.stringify(rows)); } catch { /* too much: fewer of them */ }
  }
}

async function remember() {
  let rows = [];
  try { rows = JSON.parse(sessionStorage.getItem("weft") ?? "[]"); } catch { /* of another version */ }
  for (const row of rows) {
    const item = { ...row, id: state.next++, file: null, progress: {}, views: {}, picture: null };
    item.answers = Object.fromEntries(Object.entries(row.answers).filter(([name]) => modelOf(name)));
    state.items.push(item);
    if (item.thumb) try {
      const image = new Image();
      image.src = item.thumb;
      await image.decode();
      item.picture = image;
    } catch { item.thumb = ""; }
  }
  state.current = state.items.at(-1)?.id ?? null;
}

// The beginning ----------------------------------------------------------------------------------------------------

async function begin() {
  let found;
  try { found = await request("GET", "/models"); } catch { return waitForServer(); }
  if (found.status === 401) { $("ask").hidden = false; return $("token").focus(); }
  if (found.status !== 200) { $("away").hidden = false; $("away").textContent = found.told.error; return; }
  $("ask").hidden = true;
  state.models = found.told.models;
  state.limits = found.told.limits;
  const options = () => state.models.map(model => make("option", { value: model.name }, model.name));
  $("model").replaceChildren(...options());
  $("beside").replaceChildren(make("option", { value: "" }, "none"), ...options());
  $("models").hidden = false;
  $("second").hidden = state.models.length < 2;
  if (!state.items.length) await remember();
  show();
  work();
  samples();
}

async function samples() {
  const { status, told } = await request("GET", "/samples").catch(() => ({ status: 0 }));
  if (status !== 200 || !told.samples.length || $("samples").children.length) return;
  for (const [number, name] of told.samples.entries()) {
    const { told: blob } = await request("GET", `/samples/${number}`);
    const button = make("button", { type: "button", title: name }, make("img", { src: URL.createObjectURL(blob), alt: name }));
    button.onclick = () => take([new File([blob], `${name}.png`, { type: "image/png" })]);
    $("samples").append(make("li", {}, button));
  }
  $("try").hidden = $("samples").hidden = false;
}

function listen() {
  if (navigator.maxTouchPoints > 0) {
    for (const element of document.querySelectorAll(".camera")) element.hidden = false;
    $("title").textContent = "Your pictures";
  }
  for (const id of ["files", "photo"]) $(id).onchange = event => { take(event.target.files); event.target.value = ""; };
  for (const name of ["dragenter", "dragover"]) addEventListener(name, event => { event.preventDefault(); $("drop").classList.add("over"); });
  for (const name of ["dragleave", "drop"]) addEventListener(name, event => { event.preventDefault(); $("drop").classList.remove("over"); });
  addEventListener("drop", event => take(event.dataTransfer?.files ?? []));
  addEventListener("paste", event => take(event.clipboardData?.files ?? []));
  addEventListener("keydown", event => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key) || event.target.closest("input, select, [role=tab]")) return;
    const at = state.items.findIndex(item => item.id === state.current);
    const next = state.items[at + (event.key === "ArrowLeft" ? 1 : -1)]; // the newest is the first
    if (next) { state.current = next.id; show(); tell(`${next.name}: ${chosen().map(name => summary(next, name).text).join(", ")}`); }
  });
  $("model").onchange = $("beside").onchange = () => { show(); work(); };
  $("csv").onclick = () => save("weft.csv", new Blob([csvOf(state.items)], { type: "text/csv" }));
  $("coco").onclick = async () => {
    for (const name of chosen())
      if (state.items.some(item => item.answers[name]?.size)) save(`weft-${name.replaceAll("/", "-")}.json`, new Blob([await cocoOf(state.items, modelOf(name))], { type: "application/json" }));
  };
  $("clear").onclick = () => { state.items = []; state.current = null; keep(); show(); $("files").focus(); };
  $("ask").onsubmit = event => {
    event.preventDefault();
    state.token = $("token").value;
    for (const item of state.items) for (const [name, told] of Object.entries(item.answers)) if (told.error?.startsWith("A token")) delete item.answers[name];
    begin();
  };
}

listen();
begin();
