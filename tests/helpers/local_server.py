"""A small HTTP server in threads of the process that tests, for what speaks to a real one elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Writes no line for each request."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: type[QuietHandler], **attributes: Any) -> Iterator[str]:
    """The address of a server whose handlers have these attributes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
