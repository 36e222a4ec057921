// The page: its state, the server behind it, and how it begins.

const $ = id => document.getElementById(id);
const state = {
  models: [], limits: { bytes: Infinity, seconds: 30 }, token: "", away: false,
  items: [], next: 1, current: null, large: null, // of the current picture alone: { id, picture }
  busy: 0, decoding: 0, keeping: 0,
};

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
const currentItem = () => state.items.find(item => item.id === state.current);

/** An id in this page; the names of models are those of folders and may have spaces, which no id may. */
const idOf = (part, name) => `${part}-${state.models.findIndex(model => model.name === name)}`;

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
    if (onProgress) call.upload.onprogress = ({ loaded, total }) => onProgress(total ? loaded / total : 0);
    call.onload = () => resolve({
      status: call.status,
      told: call.responseType === "blob" ? call.response : parsed(call),
      retry: +call.getResponseHeader("Retry-After") || 1,
    });
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

// The beginning ----------------------------------------------------------------------------------------------------

async function begin() {
  let found;
  try { found = await request("GET", "/models"); } catch { return waitForServer(); }
  if (found.status === 401) { $("ask").hidden = false; return $("token").focus(); }
  if (found.status !== 200) { $("away").hidden = false; $("away").textContent = found.told.error; return; }
  $("ask").hidden = true;
  state.models = found.told.models;
  state.limits = found.told.limits;
  offerModels();
  if (!state.items.length) await remember();
  show();
  showSession();
  work();
  samples();
}

function offerModels() {
  const options = () => state.models.map(model => make("option", { value: model.name }, model.name));
  $("model").replaceChildren(...options());
  $("beside").replaceChildren(make("option", { value: "" }, "none"), ...options());
  $("models").hidden = false;
  $("second").hidden = state.models.length < 2;
}

async function samples() {
  const { status, told } = await request("GET", "/samples").catch(() => ({ status: 0 }));
  if (status !== 200 || !told.samples.length || $("samples").children.length) return;
  for (const [number, name] of told.samples.entries()) {
    const { told: blob } = await request("GET", `/samples/${number}`);
    const picture = make("img", { src: URL.createObjectURL(blob), alt: name });
    const button = make("button", { type: "button", title: name }, picture);
    button.onclick = () => take([new File([blob], `${name}.png`, { type: "image/png" })]);
    $("samples").append(make("li", {}, button));
  }
  $("try").hidden = $("samples").hidden = false;
}

function listenForPictures() {
  if (navigator.maxTouchPoints > 0) {
    for (const element of document.querySelectorAll(".camera")) element.hidden = false;
    $("title").textContent = "Your pictures";
    $("ways").hidden = true;
  }
  for (const id of ["files", "photo"])
    $(id).onchange = event => { take(event.target.files); event.target.value = ""; };
  const over = (names, on) => names.forEach(name => addEventListener(name, event => {
    event.preventDefault();
    $("drop").classList.toggle("over", on);
  }));
  over(["dragenter", "dragover"], true);
  over(["dragleave", "drop"], false);
  addEventListener("drop", event => take(event.dataTransfer?.files ?? []));
  addEventListener("paste", event => take(event.clipboardData?.files ?? []));
}

/** Arrows go through the pictures; with Alt and its like they are the browser's. */
function listenForArrows() {
  addEventListener("keydown", event => {
    const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key]; // the newest is the first
    if (!step || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest("input, select, [role=tab]")) return;
    const next = state.items[state.items.findIndex(item => item.id === state.current) + step];
    if (!next) return;
    go(next.id);
    tell(`${next.name}: ${chosen().map(name => summary(next, name).text).join(", ")}`);
  });
}

function listenForButtons() {
  $("model").onchange = $("beside").onchange = () => { show(); showSession(); work(); };
  $("csv").onclick = () => save("weft.csv", new Blob([csvOf(state.items)], { type: "text/csv" }));
  $("coco").onclick = saveCoco;
  $("clear").onclick = () => { clear(); $("files").focus(); };
  $("ask").onsubmit = event => {
    event.preventDefault();
    state.token = $("token").value;
    for (const item of state.items)
      for (const [name, told] of Object.entries(item.answers))
        if (told.error?.startsWith("A token")) delete item.answers[name];
    begin();
  };
}

listenForPictures();
listenForArrows();
listenForButtons();
addEventListener("pagehide", keep);
begin();
