"""A real nginx with WebDAV, started for the tests. Needs no root and touches nothing outside its folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

CONFIG = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log {folder}/access.log; client_max_body_size 64m; default_type application/octet-stream;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port}{tls}; root {folder}/www; {certificate}
    location / {{ dav_methods PUT DELETE; create_full_put_path on; dav_access user:rw; {location} }}
  }}
}}
"""


def missing() -> str | None:
    """Why these tests cannot run here, or None."""
    if NGINX is None:
        return "nginx is not installed (apt-get install nginx-light)"
    built = subprocess.run([NGINX, "-V"], capture_output=True, text=True).stderr
    return None if "http_dav_module" in built else "this nginx was built without WebDAV"


def make_certificate(folder: Path) -> Path:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem"


@contextmanager
def nginx(folder: Path, *, tls: bool = False, location: str = "") -> Iterator[str]:
    """Run nginx in ``folder``; yields its URL."""
    (folder / "www").mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    certificate = ""
    if tls:
        certificate = f"ssl_certificate {make_certificate(folder)}; ssl_certificate_key {folder}/key.pem;"
    text = CONFIG.format(
        folder=folder, port=port, tls=" ssl http2" if tls else "", certificate=certificate, location=location
    )
    (folder / "nginx.conf").write_text(text)
    process = subprocess.Popen([NGINX, "-p", folder, "-c", folder / "nginx.conf"], stderr=subprocess.PIPE)
    try:
        for _ in range(200):
            if process.poll() is not None:
                raise RuntimeError(f"nginx did not start: {process.stderr.read().decode()}")
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)
        process.stderr.close()
