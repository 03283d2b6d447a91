"""A server program for tests of processes: ready after so many polls, answers every chat."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ("tiny", " server", " says", " hello")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    unready_answers = 0
    polls = itertools.count()

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "tiny"}]})
        elif self.path == "/health":
            self._json(200 if next(self.polls) >= self.unready_answers else 503, {})
        else:
            self._json(404, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/chat/completions":
            self._json(404, {})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in WORDS:
            self._event({"choices": [{"delta": {"content": word}}]})
        usage = {"prompt_tokens": 9, "completion_tokens": len(WORDS)}
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: object) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--unready-answers", type=int, default=0)
    parser.add_argument("--fail")
    parser.add_argument("--memory-mb", type=int, default=0)
    args = parser.parse_args()
    if args.fail:
        sys.exit(args.fail)
    Handler.unready_answers = args.unready_answers
    held = bytearray(args.memory_mb << 20)
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
    del held


if __name__ == "__main__":
    main()
