"""Completions from vLLM servers (--rollout_server), which get the trained weights and prove that they sample
from them.

Plain HTTP; requests and answers are those of vLLM 0.32 in development mode (docs/rollouts.md). The weights
get there through a folder that the servers can read. After each push every server answers a probe: its
log-probabilities have to be those of the trained model. A stale cache, a packed copy of old weights or a
reload without effect would show nowhere else.

A server that fails is left out until the next push, and the others sample its completions with the same
seeds. With none left the run is saved and ends with one line.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
import hashlib
import http.client
import json
import math
import os
from pathlib import Path
import re
import shutil
import time
from typing import Any, NamedTuple
import urllib.error
import urllib.request
import uuid

from accelerate import Accelerator
from common.collators import Window
from common.errors import OutsideError, UserError, quoted, say
from common.files import writing
from common.model.flat_model import base_lm
from common.model.merge import policy_writer
from common.processes import on_each_process, on_main_process
from common.sampling.generate import Sampled, distinct_prompts
import numpy as np
import torch
from torch import nn

PAUSES = (0.0, 1.0, 4.0)  # seconds before each try of a request
REQUEST_TIMEOUT = 60.0  # seconds for a short answer
LOAD_TIMEOUT = 1800.0  # to load weights, or to begin a completion
TOKEN_TIMEOUT = 0.2  # more for each token of a completion
AT_ONCE = 64  # requests of a process in flight, per server
PROBE_PROMPT = 18  # tokens: more than a block of the prefix cache, so that a stale one shows
PROBE_TOKENS = 16


class Tolerance(NamedTuple):
    """How far log-probabilities of servers may be off, in nats."""

    max_error_probe: float  # on average over a probe
    max_error_rollout: float  # on average over a rollout, and over each of its completions
    # how far the model must have moved since a server's answer to the probe last changed, to know that the
    # server has old weights
    min_drift: float


# Where both sides compute in float32, correct log-probabilities differ by 1e-6 to 4e-5, those of old weights
# or an old cache by 0.3 to 8. With a server in bfloat16 completions of SmolLM2-135M differ by 0.06 at most, and
# answers to another prompt by 0.66 at least.
EXACT = Tolerance(1e-3, 1e-2, 1e-4)
ROUNDED = Tolerance(0.2, 0.5, 1e-2)
# In each request for a completion, so that only temperature, top_k and top_p shape the distribution.
PLAIN = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "logprobs": 0,
    "return_token_ids": True,
    "skip_special_tokens": False,
}
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are on a private network


class ServerFault(UserError):
    """No answer, an error, or an answer that cannot be right: another server may do better."""


def request_seed(key: Sequence[int]) -> int:
    """63 bits from a key, the same in any process: a completion is drawn alike by any server, and when
    repeated."""
    text = ",".join(str(int(part)) for part in key)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def request_json(url: str, path: str, body: Any = None, seconds: float = REQUEST_TIMEOUT) -> dict[str, Any]:
    """The JSON object that a server answers. body: of a POST. Raises ServerFault if there is none, or not in
    time."""
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("VLLM_API_KEY", "").strip()
    if not key.isprintable():
        raise UserError("VLLM_API_KEY has characters that a header cannot have")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    endpoint = path.split("?")[0]
    problem = ""
    for pause in PAUSES:
        time.sleep(pause)
        try:
            request = urllib.request.Request(url + path, data, headers)
            with OPENER.open(request, timeout=seconds) as response:
                answer = json.loads(response.read() or b"{}")
            return answer if isinstance(answer, dict) else {}
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode(errors="replace")
            problem = f"HTTP {error.code} to {endpoint}: {text}"
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):  # another try would take as long
                raise ServerFault(f"no answer to {endpoint} in {seconds:.0f} s") from None
            problem = quoted(reason, 400, str)
    if key:
        problem = problem.replace(key, "(key)")
    raise ServerFault(problem)


class RolloutServers:
    """Servers that sample with the weights of the trained model."""

    def __init__(
        self,
        urls: list[str],
        accelerator: Accelerator,
        model: nn.Module,
        folder: str,
        longest: int,
        **settings: Any,
    ):
        """Check the servers; called on every process. Raises UserError, with the command that starts a
        suitable one, if a server does not answer or does not fit.

        model: as prepared. folder: where the servers can read what this process writes. longest: tokens of a
        sequence, prompt and completion. settings: max_new_tokens, temperature, top_k and top_p, as of `sample`.
        """
        self.accelerator = accelerator
        self.model = model
        self.flat_model = accelerator.unwrap_model(model)
        self.folder = Path(folder).resolve() / "rollout_weights"
        self.longest = longest
        self.settings = settings
        lm = base_lm(self.flat_model.lm)
        self.vocabulary = lm.get_input_embeddings().weight.shape[0]
        # The loss needs log-probabilities of the whole distribution at the temperature. vLLM's raw ones are
        # at temperature 1, its processed ones are of the tokens that can be drawn.
        self.modes = []
        if settings["top_k"] <= 0 and settings["top_p"] >= 1:
            self.modes.append("processed_logprobs")
        if settings["temperature"] == 1:
            self.modes.append("raw_logprobs")
        if not self.modes:
            raise UserError(
                "--rollout_server: with --top_k or --top_p vLLM has no log-probabilities at this --temperature"
            )
        name = lm.config._name_or_path or "MODEL"
        self.start_hint = (
            f"start it with: VLLM_SERVER_DEV_MODE=1 vllm serve {name} --host 127.0.0.1 --port 8000 "
            f"--max-model-len {longest} --generation-config vllm --logprobs-mode {self.modes[0]}"
        )
        self.urls = [url.rstrip("/") for url in dict.fromkeys(urls)]
        self.failed = {}  # {url: why} of those that are left out, until the next push
        self.background = ThreadPoolExecutor(1)  # one rollout after another
        self.running = []
        self.synced = None  # the step whose weights the servers have
        self.version = ""  # of these weights
        self.run_id = on_main_process(accelerator, lambda: uuid.uuid4().hex[:8])
        # {url: (its answer to the probe when that last changed, our log-probabilities then)}
        self.probes = {}
        dtypes = on_main_process(accelerator, lambda: {self._check_server(url) for url in self.urls})
        is_float32 = accelerator.mixed_precision == "no" and lm.dtype == torch.float32
        self.tolerance = EXACT if is_float32 and dtypes == {"float32"} else ROUNDED
        self.dtype = None  # that weights are written in, if not the model's
        if dtypes in ({"bfloat16"}, {"float16"}):
            self.dtype = getattr(torch, dtypes.pop())
        say(f"rollouts come from {len(self.urls)} vLLM server{'s' * (len(self.urls) > 1)}")

    def _check_server(self, url: str) -> str:
        """The dtype of a server's weights. Raises UserError if it does not fit."""
        if not re.fullmatch(r"https?://[\w.:\[\]-]+", url):  # not printed: it may hold a password
            raise UserError(
                "--rollout_server: expected addresses as http://127.0.0.1:8000; the key is VLLM_API_KEY"
            )
        try:
            model = request_json(url, "/server_info?config_format=json")["vllm_config"]["model_config"]
            if request_json(url, "/is_paused").get("is_paused"):  # by a run that was killed
                request_json(url, "/resume", {})
            self._complete(url, [self.vocabulary - 1], 0, 1, {})  # it takes our key, and all our tokens
            mode = model["logprobs_mode"]
            generation = model.get("generation_config", "vllm")
            dtype = str(model["dtype"]).removeprefix("torch.")
            room = int(model["max_model_len"])
        except (ServerFault, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--rollout_server {url} does not answer as vLLM 0.32 in development mode does ({error}): {self.start_hint}"
            ) from None
        if room < self.longest or mode not in self.modes or generation != "vllm":
            flags = f"--max-model-len {room} --generation-config {generation} --logprobs-mode {mode}"
            raise UserError(f"--rollout_server {url} was started with {flags}: {self.start_hint}")
        return dtype

    # --- weights --------------------------------------------------------------------------------------------

    def sync(self, step: int) -> None:
        """Give the servers the current weights, those of `step`, unless they have them, and let each prove
        it. Called on every process. Raises OutsideError if no server is left."""
        if self.synced == step:
            return
        wait(self.running)  # a rollout uses one set of weights; its errors are raised where it is awaited
        self.running.clear()
        path = self.folder / f"step-{step}"
        self.version = f"{step}-{self.run_id}"
        self.synced = step
        self._write(path)
        random = np.random.default_rng(0)
        prompt = random.integers(3, min(256, self.vocabulary), size=PROBE_PROMPT).tolist()
        answers = on_main_process(self.accelerator, lambda: self._load_all(path, prompt))
        ours = {}
        for url, answer in answers.items():
            if isinstance(answer, Sampled):
                ours[url] = self._score(prompt, answer.ids)
        self.failed = on_main_process(self.accelerator, lambda: self._failures(answers, ours))
        for url, reason in self.failed.items():
            say(f"{url} is left out: {reason}")
        self._servers_left()  # raises if there is none

    def _failures(self, answers: dict[str, Sampled | str], ours: dict[str, np.ndarray]) -> dict[str, str]:
        """{url: why} of the servers that are left out. ours: the model's log-probabilities of the answers."""
        failures = {}
        for url, answer in answers.items():
            reason = self._mismatch_reason(url, answer, ours[url]) if url in ours else answer
            if reason:
                failures[url] = reason
        return failures

    def _write(self, path: Path) -> None:
        write = policy_writer(self.accelerator, self.model, self.dtype)

        def write_whole() -> None:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
            with writing(path):
                path.mkdir(parents=True)
                write(path)

        on_main_process(self.accelerator, write_whole)

    def _load_all(self, path: Path, prompt: list[int]) -> dict[str, Sampled | str]:
        """Each server's answer to the probe with the new weights, or why there is none."""
        with ThreadPoolExecutor(len(self.urls)) as pool:
            answers = list(pool.map(lambda url: self._load(url, path, prompt), self.urls))
        shutil.rmtree(path, ignore_errors=True)
        return dict(zip(self.urls, answers, strict=True))

    def _load(self, url: str, path: Path, prompt: list[int]) -> Sampled | str:
        try:
            self._check_server(url)  # it may have been restarted with other settings
            request_json(url, "/pause?mode=wait", {}, LOAD_TIMEOUT)
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            request_json(url, "/collective_rpc", call, LOAD_TIMEOUT)
            request_json(url, "/reset_prefix_cache", {})
            request_json(url, "/update_weight_version", {"new_version": self.version})
            request_json(url, "/resume", {})
            settings = {"temperature": self.settings["temperature"]}
            return self._complete(url, prompt, request_seed((0,)), PROBE_TOKENS, settings)
        except UserError as problem:
            return str(problem)

    def _score(self, prompt: list[int], ids: list[int]) -> np.ndarray:
        """The trained model's log-probabilities of the tokens after a prompt. Called on every process."""
        mask = np.array([0] * len(prompt) + [1] * len(ids), np.float32)
        sequence = {"input_ids": np.array(prompt + ids), "loss_mask": mask}
        temperature = self.settings["temperature"]
        window = Window(self.accelerator, [[sequence]], [[0]])
        window.add_fields(lambda batch: {"logps": self.flat_model(batch, temperature=temperature).logps})
        return sequence["logps"][len(prompt) :]

    def _mismatch_reason(self, url: str, answer: Sampled, ours: np.ndarray) -> str:
        """Why a server does not seem to have the current weights; empty if it does."""
        error = float(np.abs(ours - answer.logps).mean())
        most = self.tolerance.max_error_probe
        if not error <= most:  # or NaN
            return f"it does not sample from the weights it was given: a probe is {error:.3g} nats off, {most} is the most"
        if url not in self.probes or self.probes[url][0] != answer:
            self.probes[url] = answer, ours
        _, ours_before = self.probes[url]
        moved = float(np.abs(ours - ours_before).max())
        if moved > self.tolerance.min_drift:
            return f"it still samples from old weights: it answers a probe as before, and the model has moved by {moved:.3g}"
        return ""

    def check(self, metrics: Any) -> None:
        """End the run if a window, or one completion in it, was sampled from a model too far from the trained
        one. Called on every process, after the gradients of each window."""
        means = metrics.window_means()
        error = means.get("sampling/logp_difference", 0.0)
        error = max(error, means.get("sampling/completion_difference_max", 0.0))
        most = self.tolerance.max_error_rollout
        if error > most:
            raise UserError(
                f"--rollout_server: completions are {error:.2g} nats a token off the model; {most} is the most"
            )

    # --- completions ----------------------------------------------------------------------------------------

    def sample(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]], **settings: Any
    ) -> list[Sampled]:
        """Sample a completion for each prompt, as `sample` does. Called on every process. settings: max_new_tokens
        or a temperature, if they differ this time. Raises OutsideError if no server is left."""
        return on_each_process(self.accelerator, self.begin(prompts, keys, **settings).result)

    def begin(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]], **settings: Any
    ) -> Future[list[Sampled]]:
        """Start sampling in the background, with the weights of now; see `sample`. Not collective. A
        completion is a function of its key and the weights, whichever server samples it."""
        settings = self.settings | settings
        limits = settings.pop("max_new_tokens")
        if isinstance(limits, int):
            limits = [limits] * len(prompts)
        requests = list(zip(map(list, prompts), map(request_seed, keys), limits, strict=True))
        rollout = self.background.submit(self._complete_all, requests, settings)
        self.running.append(rollout)
        return rollout

    def _complete_all(
        self, requests: list[tuple[list[int], int, int]], settings: dict[str, Any]
    ) -> list[Sampled]:
        # All completions of a prompt go to one server, which has it in its cache.
        _, owner = distinct_prompts([prompt for prompt, *_ in requests])

        def complete(i: int) -> tuple[str, Sampled]:
            while True:
                left = self._servers_left()
                url = left[owner[i] % len(left)]
                try:
                    return url, self._complete(url, *requests[i], settings, self.flat_model.stop_ids)
                except ServerFault as fault:
                    self._leave_out(url, str(fault))

        urls = [""] * len(requests)  # of each completion, the server that sampled it
        completions = [None] * len(requests)
        waiting = list(range(len(requests)))
        with ThreadPoolExecutor(AT_ONCE * len(self.urls)) as pool:
            while waiting:
                for i, answer in zip(waiting, pool.map(complete, waiting), strict=True):
                    urls[i], completions[i] = answer
                for url in set(urls) - self.failed.keys():
                    self._check_version(url)
                waiting = [i for i, url in enumerate(urls) if url in self.failed]
        return completions

    def _check_version(self, url: str) -> None:
        """Leave out a server that has had other weights since the push."""
        try:
            version = request_json(url, "/weight_info").get("weight_version")
            if version != self.version:
                raise ServerFault(
                    f"its weights are {version!r}, not {self.version!r}: restarted, or used by another run"
                )
        except ServerFault as fault:
            self._leave_out(url, str(fault))

    def _leave_out(self, url: str, reason: str) -> None:
        if url in self.failed:  # said by another thread
            return
        self.failed[url] = reason
        if len(self.failed) < len(self.urls):
            say(f"{url} has failed ({reason}): the others sample its completions, with the same seeds")

    def _servers_left(self) -> list[str]:
        left = [url for url in self.urls if url not in self.failed]
        if not left:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in self.failed.items())
            raise OutsideError(
                f"--rollout_server: none is left ({reasons}): {self.start_hint}; then the same command resumes the run"
            )
        return left

    def _complete(
        self,
        url: str,
        prompt: list[int],
        seed: int,
        limit: int,
        settings: dict[str, Any],
        stops: Sequence[int] = (),
    ) -> Sampled:
        """Sample a completion, with the server's log-probabilities."""
        body = PLAIN | {
            "prompt": prompt,
            "max_tokens": limit,
            "seed": seed,
            "stop_token_ids": list(stops),
            **settings,
        }
        answer = request_json(url, "/v1/completions", body, LOAD_TIMEOUT + TOKEN_TIMEOUT * limit)
        try:
            [choice] = answer["choices"]
            ids = choice["token_ids"]
            logps = choice["logprobs"]["token_logprobs"]
            reason = choice["finish_reason"]
            # a server shortens a prompt that is too long without saying so
            is_whole = choice["prompt_token_ids"] == prompt and len(ids) == len(logps)
            is_known = all(type(i) is int and 0 <= i < self.vocabulary for i in ids)
            is_finite = all(map(math.isfinite, logps))
            is_stopped = reason == "stop" and ids[-1] in stops
            is_ended = is_stopped or (reason == "length" and len(ids) == limit)
            fits = is_whole and is_known and is_finite and is_ended
        except (LookupError, TypeError, ValueError, OverflowError):  # 10**400 is no float
            fits = False
        if not fits:
            raise ServerFault(f"an answer that is no completion of {limit} tokens: {quoted(answer)}")
        return Sampled(ids, logps, is_stopped)
