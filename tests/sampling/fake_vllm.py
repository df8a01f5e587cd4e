"""A server that speaks vLLM's protocol (0.32, as it was recorded) over the project's own sampler, and can
play its faults.

Plays: "slow", "dies in a rollout", "hangs", "500", "500 twice" (for each completion), "aborts", "refuses a
reload", "old weights" (the version is right), "half a reload" (one matrix stays), "old cache" (computed with
the weights of before), "restarts" (other weights in the middle of a rollout), "no development mode", "unknown
token", "NaN", "a long number", "cuts the prompt", "another prompt" (the
answer of another request), "stops anywhere".
"""

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
from pathlib import Path
import threading
import time
from typing import Any

from common.model.wrap import wrap
from common.sampling import sample
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM

BLOCK = 16  # tokens, of the prefix cache
BATCHES = (
    threading.Lock()
)  # one at a time, of all servers: the compiler's stance, which `generating` sets, is of the process


class Asked:
    """A request for a completion, and then what was sampled for it: log-probabilities, ids, finished."""

    def __init__(self, body: dict[str, Any], limit: int):
        self.body, self.limit, self.done = body, limit, None

    def drawing(self) -> dict[str, Any]:
        body = self.body
        top_k = max(0, body.get("top_k", 0))
        return {"temperature": body.get("temperature", 1.0), "top_k": top_k, "top_p": body.get("top_p", 1.0)}

    def alike(self) -> Any:
        return *self.drawing().values(), *self.body.get("stop_token_ids", [])


class FakeVLLM:
    """A server on a free port of this machine: `url`. Used as a context manager."""

    def __init__(
        self,
        model: Any,
        *,
        mode: str = "processed_logprobs",
        max_model_len: int = 128,
        dtype: str = "float32",
        generation_config: str = "vllm",
        play: str = "",
        keys: dict[int, tuple[int, ...]] | None = None,
        key: str = "",
    ):
        """model: of transformers, or a folder. keys: of the project's sampler, by the seed that a request has
        instead. key: that /v1 wants."""
        lm = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, str | Path) else model
        self.model, self.keys = wrap(lm.eval()), keys or {}
        self.first = {name: value.clone() for name, value in lm.state_dict().items()}
        self.V = lm.get_input_embeddings().weight.shape[0]
        self.mode, self.max_model_len, self.dtype, self.play = mode, max_model_len, dtype, play
        self.generation_config, self.key = generation_config, key
        self.version, self.paused, self.reloads, self.served, self.asked = "default", False, 0, 0, []
        self.is_stale = False  # reloaded, and the prefix cache is not reset
        # starts of prompts: the weights of then
        self.cached: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
        self.tries: dict[int, int] = {}  # of each seed
        self.lock, self.is_dead = threading.Lock(), False
        self.waiting: list[Asked] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

            def _answer(self, body: dict[str, Any] | None) -> None:
                try:
                    status, answer = 401, {"error": f"Unauthorized: {self.headers['Authorization']}"}
                    is_open = not fake.key or not self.path.startswith("/v1")
                    if is_open or self.headers["Authorization"] == f"Bearer {fake.key}":
                        status, answer = fake.answer(self.path.split("?")[0], body)
                except ConnectionAbortedError:  # it is dead: nothing more is said
                    self.close_connection = True
                    return
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        class Quiet(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 256

            def handle_error(self, *_: Any) -> None:  # a client that has gone
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> "FakeVLLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.die()

    def die(self) -> None:
        """As a process that is killed: connections break, new ones are refused."""
        if not self.is_dead:
            self.is_dead = True
            threading.Thread(target=self._close, daemon=True).start()

    def _close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    # --- what it answers ------------------------------------------------------------------------------------

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if self.is_dead:
            raise ConnectionAbortedError
        self.asked.append(path)
        if path == "/v1/completions":
            return self._complete(body)
        if self.play == "no development mode":
            return 404, {"detail": "Not Found"}
        if path == "/server_info":
            model = {"model": "m", "dtype": f"torch.{self.dtype}", "max_model_len": self.max_model_len}
            model |= {"logprobs_mode": self.mode, "generation_config": self.generation_config}
            return 200, {"vllm_config": {"model_config": model}}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return 200, {"status": path.strip("/") + "d"}
        if path == "/collective_rpc":
            return self._reload(Path(body["kwargs"]["weights_path"]))
        if path == "/reset_prefix_cache":
            self.is_stale = False
            if self.play != "old cache":
                self.cached.clear()
            return 200, {"success": True}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        return 404, {"detail": "Not Found"}

    def _reload(self, folder: Path) -> tuple[int, Any]:
        self.reloads, self.is_stale = self.reloads + 1, True
        if self.play == "refuses a reload" or not folder.is_dir():
            return 500, error(
                "Call to collective_rpc method failed: Worker failed with error 'Repo id must …'"
            )
        weights = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        if self.play == "half a reload":
            weights = {name: value for name, value in weights.items() if "mlp" not in name}
        if self.play != "old weights" or self.reloads == 1:
            with BATCHES:
                unknown = self.model.lm.load_state_dict(weights, strict=False).unexpected_keys
            if unknown:
                return 500, error(f"There is no module or parameter named {unknown[0]!r}")
        return 200, {"results": [None]}

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt, limit = body["prompt"], body["max_tokens"]
        if self.is_stale:
            return 500, error("the prefix cache has keys of the old weights")
        if bad := [i for i in prompt if not 0 <= i < self.V]:
            return 400, error(f"Token id {bad[0]} is out of vocabulary")
        if len(prompt) >= self.max_model_len:
            return 400, error(f"This model's maximum context length is {self.max_model_len} tokens.")
        is_of_rollout = "seed" in body and self.reloads > 0 and body.get("max_tokens") and self.counts(body)
        if is_of_rollout:
            self.served += 1
            if self.play == "dies in a rollout" and self.served > 2:
                self.die()
                raise ConnectionAbortedError
            if self.play == "restarts" and self.served == 3:
                with BATCHES:
                    self.version, self.play = "default", ""
                    self.model.lm.load_state_dict(self.first)
            if self.play == "slow":
                time.sleep(0.3)
        with self.lock:
            self.tries[body["seed"]] = tried = self.tries.get(body["seed"], 0) + is_of_rollout
        if is_of_rollout and (self.play == "500" or self.play == "500 twice" and tried <= 2):
            return 500, error("EngineCore encountered an issue. See stack trace (above) for the root cause.")
        while (self.paused or self.play == "hangs" and is_of_rollout) and not self.is_dead:
            time.sleep(0.02)
        asked = Asked(body, min(limit, self.max_model_len - len(prompt)))
        with self.lock:
            self.waiting.append(asked)
        while asked.done is None:  # who comes first samples for all that have come meanwhile
            with BATCHES:
                if asked.done is None:
                    self._sample_waiting()
        logps, ids, finished = asked.done
        reason = "stop" if finished else "length"
        if self.play == "aborts" and is_of_rollout:
            ids, logps, reason = ids[:1], logps[:1], "abort"
        if is_of_rollout:
            ids = [self.V, *ids[1:]] if self.play == "unknown token" else ids
            logps = [float("nan"), *logps[1:]] if self.play == "NaN" else logps
            logps = [-(10**400), *logps[1:]] if self.play == "a long number" else logps
            reason = "stop" if self.play == "stops anywhere" else reason
        read = prompt[1:] if self.play == "cuts the prompt" and is_of_rollout else prompt
        if self.play == "another prompt" and is_of_rollout:
            read = [*prompt[:-1], prompt[-1] + 1]
        choice = {
            "index": 0,
            "text": "",
            "logprobs": {"token_logprobs": logps},
            "finish_reason": reason,
            "token_ids": ids,
            "prompt_token_ids": read,
        }
        usage = {"prompt_tokens": len(read), "completion_tokens": len(ids)}
        return 200, {"choices": [choice], "usage": usage}

    def counts(self, body: dict[str, Any]) -> bool:
        """Whether a request is one of a rollout: a probe has no stop tokens."""
        return bool(body.get("stop_token_ids"))

    def _sample_waiting(self) -> None:
        """All requests that wait and draw alike, in one batch."""
        time.sleep(0.003)
        with self.lock:
            first = self.waiting[0].alike()
            batch = [asked for asked in self.waiting if asked.alike() == first]
            self.waiting = [asked for asked in self.waiting if asked not in batch]
        now = (
            {name: value.clone() for name, value in self.model.lm.state_dict().items()}
            if self.play == "old cache"
            else {}
        )
        for part in [[asked] for asked in batch] if now else [batch]:
            start = tuple(part[0].body["prompt"][:BLOCK])
            if now and len(part[0].body["prompt"]) > BLOCK:
                self.model.lm.load_state_dict(self.cached.setdefault(start, now))
            seeds = [asked.body.get("seed", 0) for asked in part]
            drawing = part[0].drawing()
            done = sample(
                self.model,
                [asked.body["prompt"] for asked in part],
                [self.keys.get(seed, (seed,)) for seed in seeds],
                max_new_tokens=[asked.limit for asked in part],
                stop_ids=part[0].body.get("stop_token_ids", []),
                **drawing,
            )
            for asked, one in zip(part, done, strict=True):
                asked.done = self._logps(asked.body["prompt"], one.ids, drawing), one.ids, one.finished
            if now:
                self.model.lm.load_state_dict(now)

    def _logps(self, prompt: Sequence[int], ids: Sequence[int], drawing: dict[str, Any]) -> list[float]:
        """As the mode gives them, from one plain forward pass of transformers."""
        implementation = self.model.lm.config._attn_implementation
        self.model.lm.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                row = torch.tensor([[*prompt, *ids]])
                logits = self.model.lm(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        finally:
            self.model.lm.set_attn_implementation(implementation)
        # asked for without top_k and top_p only
        if self.mode == "processed_logprobs" and drawing["temperature"] > 0:
            logits = logits / drawing["temperature"]
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Error", "param": None, "code": 0}}
