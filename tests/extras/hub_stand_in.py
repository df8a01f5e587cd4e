"""A Hub of the tests: what huggingface_hub calls to make a repository and to send files there, on this machine."""

import base64
import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import threading
import time
from urllib.parse import parse_qs, urlparse


class Hub:
    """repos: {name: {file: bytes}}; calls: (method, path); fail: status to answer with; slow: seconds before each
    answer."""

    def __init__(self):
        self.repos, self.private, self.commits, self.calls = {}, {}, [], []
        self.blobs, self.fail, self.slow, self.bodies = {}, 0, 0.0, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self, value, status=200):
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle_call(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                url = urlparse(self.path)
                hub.calls.append((self.command, url.path))
                hub.bodies.append(body)
                time.sleep(hub.slow)
                if hub.fail:
                    return self.answer({"error": "the stand-in refuses"}, hub.fail)
                if "authorization" not in self.headers and "/upload/" not in url.path:
                    return self.answer({"error": "no token"}, 401)
                return self.answer(*hub.serve(self.command, url.path, body, parse_qs(url.query)))

            do_GET = do_POST = do_PUT = handle_call

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def serve(self, method, path, body, query):
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            known = name in self.repos
            self.repos.setdefault(name, {})
            self.private.setdefault(name, asked.get("visibility") == "private" or asked.get("private", False))
            return {"url": f"{self.url}/{name}", "name": name}, 409 if known else 200
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200
        if parts[0] == "upload":
            self.blobs[parts[1]] = body
            assert hashlib.sha256(body).hexdigest() == parts[1]
            return {}, 200
        if "info" in parts:  # OWNER/NAME.git/info/lfs/objects/batch
            objects = [
                {"oid": o["oid"], "size": o["size"]}
                | ({} if o["oid"] in self.blobs else {"actions": {"upload": {"href": f"{self.url}/upload/{o['oid']}"}}})
                for o in json.loads(body)["objects"]
            ]
            return {"transfer": "basic", "objects": objects}, 200
        name, rest = "/".join(parts[2:4]), parts[4:]
        files = self.repos.get(name)
        if files is None:
            return {"error": "no such repository"}, 404
        if rest[:1] == ["preupload"]:
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                | {"shouldIgnore": False, "oid": None}
                for f in json.loads(body)["files"]
            ]
            return {"files": modes}, 200
        if rest[:1] == ["commit"]:
            for line in body.decode().splitlines():
                item = json.loads(line)
                key, value = item["key"], item["value"]
                if key == "header":
                    self.commits.append(value["summary"])
                elif key == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
                elif key == "deletedFile":
                    del files[value["path"]]
            return {"commitUrl": f"{self.url}/{name}/commit/0", "commitOid": "0" * 40}, 200
        if rest[:1] == ["tree"]:
            return [{"type": "file", "path": f, "size": len(b), "oid": "0" * 40} for f, b in files.items()], 200
        listed = [{"rfilename": file} for file in files]
        return {"id": name, "sha": "0" * 40, "siblings": listed, "private": self.private[name]}, 200

    def close(self):
        self.server.shutdown()
        self.server.server_close()
