// Requests to the gateway that served this page. The key stays in this tab and goes nowhere else.

const KEY = "twinfire-dashboard-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const adminKey = () => sessionStorage.getItem(KEY) ?? "";

export function setAdminKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export const url = (path) => new URL(path, document.baseURI);

export function withKey(key, headers = {}) {
  return key ? { ...headers, authorization: `Bearer ${key}` } : headers;
}

export async function fetchOk(path, options = {}) {
  const response = await fetch(url(path), { credentials: "omit", cache: "no-store", ...options });
  if (!response.ok) throw new ApiError(response.status, await faultOf(response));
  return response;
}

export async function getJson(path) {
  const response = await fetchOk(path, { headers: withKey(adminKey()) });
  return response.json();
}

// Yields {event, data} of a stream of server-sent events; EventSource cannot send a key.
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const frames = rest.split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const parsed = parseFrame(frame);
        if (parsed.data) yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseFrame(frame) {
  let event = "message";
  const data = [];
  for (const line of frame.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return { event, data: data.join("\n") };
}

async function faultOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? `The gateway answered ${response.status}.`;
  } catch {
    return `The gateway answered ${response.status}.`;
  }
}
