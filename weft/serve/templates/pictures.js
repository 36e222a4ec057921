// The session's pictures: taken in, decoded, sent, listed, and kept for a reload.

const SENT_AT_ONCE = 3;
const DECODED_AT_ONCE = 2; // a phone's picture is 50 MB while it is decoded
const KEPT = 40; // pictures that survive a reload
const THUMB = 640; // pixels of the longer side of a picture that is kept

function take(files) {
  const pictures = [...files].filter(file => file.size || file.type);
  if (!pictures.length) return;
  const added = pictures.map(file => add({ name: file.name || "pasted picture", file, refused: tooLarge(file) }));
  go(added[0].id);
  showSession();
  work();
}

function tooLarge(file) {
  if (file.size <= state.limits.bytes) return null;
  return `larger than ${(state.limits.bytes / 2 ** 20).toFixed(0)} MB, the most that the server takes`;
}

function add(given) {
  const item = {
    id: state.next++, file: null, size: null, thumb: "", picture: null, blank: false, answers: {},
    ...given, progress: {}, views: {},
  };
  item.entry = make("button", { type: "button" });
  item.entry.onclick = () => { go(item.id); $("stage").scrollIntoView({ block: "nearest" }); };
  $("history").prepend(make("li", {}, item.entry));
  state.items.push(item);
  return item;
}

/** Puts a picture on the stage. */
function go(id) {
  const before = currentItem();
  for (const view of Object.values(before?.views ?? {})) Object.assign(view, { classes: null, reading: false });
  state.current = id;
  before?.entry.setAttribute("aria-current", "false");
  currentItem()?.entry.setAttribute("aria-current", "true");
  show();
  look();
}

function clear() {
  state.items = [];
  state.large = null;
  $("history").replaceChildren();
  go(null);
  showSession();
  keep();
}

// Decoded ----------------------------------------------------------------------------------------------------------

/** Decodes what was not seen yet, a few at a time and what is on the stage first. */
function look() {
  while (state.decoding < DECODED_AT_ONCE) {
    const item = nextToDecode();
    if (!item) return;
    state.decoding++;
    decode(item).finally(() => { state.decoding--; look(); });
  }
}

function nextToDecode() {
  const item = currentItem();
  return item?.file && state.large?.id !== item.id ? item : state.items.find(one => one.file && !one.seen);
}

/** Makes copies of a picture as the browser sees it, one for the stage and a small one to keep; frees the whole. */
async function decode(item) {
  item.seen = true;
  if (item.id === state.current) state.large = { id: item.id, picture: null };
  try {
    const whole = await createImageBitmap(item.file);
    item.size = [whole.height, whole.width];
    if (state.large?.id === item.id) state.large.picture = copyOf(whole, LONGEST);
    const small = item.thumb ? null : copyOf(whole, THUMB);
    whole.close();
    if (small) await putThumb(item, small.toDataURL(Math.max(...item.size) < 256 ? "image/png" : "image/jpeg", 0.85));
  } catch { item.blank = true; } // not every format can be shown
  showPicture(item);
}

/** A copy with a longer side of at most so many pixels, on white, as models see what is transparent. */
function copyOf(picture, longest) {
  const scale = Math.min(1, longest / Math.max(picture.width, picture.height));
  const size = { width: Math.ceil(picture.width * scale), height: Math.ceil(picture.height * scale) };
  const canvas = make("canvas", size), context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** The small copy is an image, whose pixels the browser drops and decodes again as it needs room. */
async function putThumb(item, source) {
  const image = make("img", { src: source });
  await image.decode();
  Object.assign(item, { thumb: source, picture: image });
}

const pictureOf = item => (state.large?.id === item.id && state.large.picture) || item.picture;

// Sent -------------------------------------------------------------------------------------------------------------

/** Sends what has no answer yet, a few at a time. */
function work() {
  if (state.away) return;
  for (const name of chosen())
    for (const item of state.items) {
      if (state.busy >= SENT_AT_ONCE) return;
      if (item.answers[name] || item.progress[name] !== undefined) continue;
      if (item.refused || !item.file) {
        item.answers[name] = { error: item.refused ?? "no longer here: it was sent before the page was loaded again" };
        showAnswer(item, name);
      } else ask(item, name);
    }
}

async function ask(item, name) {
  state.busy++;
  item.progress[name] = 0;
  showProgress(item, name);
  try {
    item.answers[name] = await answerTo(item, name);
    if (item.id === state.current) tell(`${item.name}: ${summary(item, name).text}`);
    keepSoon();
  } catch (error) {
    if (!(error instanceof Away)) throw error;
    waitForServer();
  } finally {
    delete item.progress[name];
    state.busy--;
    showAnswer(item, name);
    work();
  }
}

async function answerTo(item, name) {
  const path = `/predict?model=${encodeURIComponent(name)}&top=5&score=0.05`;
  for (let tries = 0; ; tries++) {
    const { status, told, retry } = await request("POST", path, item.file, part => {
      item.progress[name] = part;
      showProgress(item, name);
    });
    if (status === 503 && tries < 20) { await pause(1000 * retry); continue; }
    if (status === 401) { $("ask").hidden = false; $("token").focus(); }
    return status === 200 ? told.pictures[0] : { error: told.error };
  }
}

// Listed -----------------------------------------------------------------------------------------------------------

/** The list as a whole, after another choice of models; what happens to one picture changes its entry alone. */
function showSession() {
  state.items.forEach(showEntry);
  showSaves();
}

function showSaves() {
  $("session").hidden = !state.items.length;
  $("coco").hidden = !state.items.some(item => chosen().some(name => item.answers[name]?.size));
}

function showEntry(item) {
  const image = item.thumb ? make("img", { src: item.thumb, alt: "" }) : null;
  item.entry.replaceChildren(
    image ?? make("span", { className: "none" }, item.blank ? "no preview" : ""),
    ...chosen().map(name => said(summary(item, name))),
    make("span", { className: "file" }, item.name));
}

const said = ({ text, bad }) => make("b", { className: bad ? "bad" : "" }, text);

// Kept -------------------------------------------------------------------------------------------------------------

/** Keeps the session in this tab, so that a reload does not lose it; the oldest go first where there is no room. */
function keep() {
  for (let first = Math.max(0, state.items.length - KEPT); first <= state.items.length; first += 5) {
    const rows = state.items.slice(first).map(({ name, size, thumb, answers }) => ({ name, size, thumb, answers }));
    try { return sessionStorage.setItem("weft", JSON.stringify(rows)); } catch { /* too much: fewer of them */ }
  }
}

/** Once a second at most: it is megabytes. */
function keepSoon() {
  state.keeping ||= setTimeout(() => { state.keeping = 0; keep(); }, 1000);
}

async function remember() {
  let rows = [];
  try { rows = JSON.parse(sessionStorage.getItem("weft") ?? "[]"); } catch { /* of another version */ }
  for (const { thumb, ...row } of rows) {
    const item = add(row);
    item.answers = Object.fromEntries(Object.entries(row.answers).filter(([name]) => modelOf(name)));
    await putThumb(item, thumb).catch(() => { item.blank = true; });
  }
  go(state.items.at(-1)?.id ?? null);
}
