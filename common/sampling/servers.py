"""Completions from vLLM servers, which receive the weights of the trained model.

Servers run beside the trainer or on other machines (docs/rollouts.md), and are reached by plain HTTP. The weights get there
through a folder that they can read. After each push every server has to prove that it samples from them: a stale cache, a
packed copy of old weights or a reload without effect shows only in its log-probabilities.
"""

import math
import shutil
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from common.collators import flat_batch
from common.errors import OutsideError, UserError, is_of_the_disk, say
from common.model.flat_model import base_lm
from common.model.save import policy_writer
from common.processes import gather_lists, on_main_process
from common.sampling.generate import Sampled
from common.sampling.server_client import (
    ASK_SECONDS,
    PROCESSED,
    Requirements,
    SamplingParams,
    Server,
    ServerFault,
    ServerInfo,
    start_command,
)
from common.sampling.server_rollout import Dispatch, Request, request_seed

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

FOLDER = "rollout_weights"  # in the output folder
PROBE_TOKENS = 16  # tokens sampled as a probe
PROBE_SEED = request_seed((0,))
# How far a server's log-probabilities of a probe may differ from ours, in nats on average: with both in float32, and
# otherwise. Correct ones in float32 differ by 1e-6 to 4e-5 (0.15 to 86 M parameters), old weights or an old cache by 0.3 to
# 8.
CLOSE, CLOSE_ROUNDED = 1e-3, 0.2
# How much ours must have changed since the last push before a server with bitwise unchanged ones is known to have old
# weights.
MOVED, MOVED_ROUNDED = 1e-4, 1e-2
MOST_DIFFERENCE = 0.5  # nats per token of a rollout, on average
STRIKES = 3  # rollouts with a failure after which a server is dropped permanently
AWAY = "left out at the last push"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Asked = tuple[tuple[int, ...], float, tuple[int, ...]]  # a prompt, a temperature, the sampled tokens


class Answer(NamedTuple):
    """A server's response to a probe."""

    asked: Asked
    logps: list[float]


class RolloutServers:
    """Servers that sample with the weights of the trained model."""

    def __init__(
        self,
        urls: Sequence[str],
        accelerator: Accelerator,
        model: nn.Module,
        *,
        folder: str | Path,
        longest: int,
        max_new_tokens: int | Sequence[int] = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        needs_logps: bool = False,
        batch_size: int = 0,
    ):
        """Wait for the servers and check them; called on every process. Raises UserError, with the correct start command, if
        one does not respond or does not meet the requirements.

        model: as prepared. folder: where the servers can read what this process writes. longest: tokens of a sequence,
        prompt and completion. needs_logps: as completions cannot be scored later. batch_size: ignored.
        """
        self.accelerator, self.model, self.max_new_tokens = accelerator, model, max_new_tokens
        self.params = SamplingParams(temperature, top_k, top_p)
        self.unwrapped = accelerator.unwrap_model(model)
        lm = base_lm(self.unwrapped.lm)
        self.required = Requirements(
            model=lm.config._name_or_path or "MODEL",
            vocabulary=lm.get_input_embeddings().weight.shape[0],
            longest=longest,
            params=self.params,
            needs_logps=needs_logps,
            device=accelerator.device.type,
            tied=bool(lm.config.get_text_config().tie_word_embeddings),
        )
        self.servers = [Server(url) for url in urls]
        self.folder = Path(folder).resolve() / FOLDER
        self.dropped: dict[str, str] = {}  # permanently: {address: why}
        self.failed: dict[str, str] = {}  # until the next push, as known to this process
        self.strikes = {server.url: 0 for server in self.servers}
        self.synced: int | None = None  # the step whose weights they have
        self.version, self.run = "", on_main_process(accelerator, lambda: uuid.uuid4().hex[:8])
        self.running: list[Future[list[Sampled]]] = []
        self.begun_by: dict[tuple[int, ...], Server] = {}  # by key: the server that has cached the turns so far
        self.answers: dict[str, Answer] = {}  # responses to the last probe
        self.scores: dict[Asked, list[float]] = {}  # the trained model's log-probabilities of the probes
        known = on_main_process(accelerator, self._check_all)
        for server, found in zip(self.servers, known, strict=True):
            server.known = found
        self.loaded: dict[str, str] = {}  # {server's address: the version it loaded last} (main process)
        self.has_logps = self._have_logps()
        if not self.has_logps:
            say(
                f"the servers' log-probabilities ({', '.join(sorted({k.mode for k in known}))}) are not those of the whole "
                f"distribution at temperature {temperature:g}: what is sampled is scored again by the model that is trained"
            )

    def _check_all(self) -> list[Any]:
        for i, server in enumerate(self.servers):
            if twin := next((other for other in self.servers[:i] if server.addresses() & other.addresses()), None):
                raise UserError(f"--rollout_server: {twin.url} and {server.url} are one server: each of them once")
        for server in self.servers:
            server.wait(self.required)
        try:
            known = [server.check(self.required) for server in self.servers]
        except ServerFault as fault:
            raise UserError(f"--rollout_server: {fault}") from None
        versions = sorted({found.version for found in known})
        say(f"rollouts come from {len(known)} server{'s' * (len(known) > 1)} of vLLM {', '.join(versions)}")
        return known

    # --- weights ------------------------------------------------------------------------------------------------------

    def sync(self, step: int) -> None:
        """Push the current weights, those of `step`, unless the servers have them, and verify each server. Called on every
        process, on the main thread. Raises OutsideError if no server is left."""
        if self.synced == step:
            return
        wait(self.running)  # a rollout uses one set of weights; its errors are raised where it is awaited
        self.running.clear()
        self.begun_by.clear()
        self._gather_failures()
        path, self.version = self.folder / f"step-{step}", f"{step}-{self.run}"
        self._write(path)
        answers = on_main_process(self.accelerator, lambda: self._load_all(path))
        scores = {asked: self._score(*asked) for asked in dict.fromkeys(answer.asked for answer in answers.values())}
        verdict = on_main_process(self.accelerator, lambda: self._verify(answers, scores))
        self.dropped, self.failed, known = verdict
        for server in self.servers:
            server.known = known[server.url]
        self.answers, self.scores, self.synced = answers, scores, step
        if self.accelerator.is_main_process:  # every server has read it
            shutil.rmtree(path, ignore_errors=True)
        if not self._alive():
            raise self._none_left(self.failed | self.dropped)
        self.has_logps = self._have_logps()

    def _have_logps(self) -> bool:
        return all(self.params.gives_logps(server.known.mode) for server in self._alive())

    def _alive(self) -> list[Server]:
        return [server for server in self.servers if server.url not in (*self.dropped, *self.failed)]

    def _gather_failures(self) -> None:
        """Gather which servers have failed since the last push, on any process, and count these failures."""
        self.failed = dict(gather_lists(self.accelerator, list(self.failed.items())))
        for url in [url for url, reason in self.failed.items() if not reason.startswith(AWAY)]:
            self.strikes[url] += 1
            if self.strikes[url] >= STRIKES:
                self._drop(url, f"it failed in {STRIKES} rollouts, the last time: {self.failed[url]}")

    def _drop(self, url: str, reason: str) -> None:
        if url not in self.dropped:
            self.dropped[url] = reason
            say(f"{url} is not used any more: {reason}")

    def _write(self, path: Path) -> None:
        """Write the current weights to a folder atomically."""
        dtypes = {DTYPES.get(server.known.dtype) for server in self.servers if server.url not in self.dropped}
        write = policy_writer(self.accelerator, self.model, dtypes.pop() if len(dtypes) == 1 else None)

        def write_whole() -> None:
            temporary = path.with_name(f".{path.name}.tmp")
            for left in self.folder.glob("*"):  # left by a run that was killed
                shutil.rmtree(left, ignore_errors=True)
            try:
                temporary.mkdir(parents=True)
                write(temporary)
                temporary.rename(path)
            except Exception as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if not is_of_the_disk(error):
                    raise
                raise UserError(
                    f"{path}: the weights for the servers cannot be written: {error}; the same command goes on from the "
                    "last checkpoint"
                ) from None

        on_main_process(self.accelerator, write_whole)

    def _load_all(self, path: Path) -> dict[str, "Answer"]:
        """Have each server load the folder and answer a probe. One that fails is dropped, an absent one is skipped."""
        tried = [server for server in self.servers if server.url not in self.dropped]
        with ThreadPoolExecutor(len(tried) or 1) as pool:
            answers = list(pool.map(lambda server: self._load(server, path), tried))
        return {server.url: answer for server, answer in zip(tried, answers, strict=True) if answer is not None}

    def _load(self, server: Server, path: Path) -> "Answer | None":
        try:
            server.must("/health", seconds=10.0)
            if server.url in self.failed or self.loaded.get(server.url) not in (None, server.version()):
                server.check(self.required)  # it may have been restarted with other settings
        except (ServerFault, UserError) as problem:
            if (reason := f"{AWAY}: {problem}") != self.failed.get(server.url):
                say(f"{server.url} is left out until it is back: {problem}")
            self.failed[server.url] = reason
            return None
        try:
            server.load(path, self.version)
            self.loaded[server.url] = self.version
            # At the rollouts' temperature, if the server's log-probabilities include it.
            temperature = self.params.temperature if server.known.mode == PROCESSED else 1.0
            # A prompt that fills a block of the prefix cache, if there is room: it reveals a stale cache.
            number = min(PROBE_TOKENS, self.required.longest - 1)
            low, high = (3, 256) if self.required.vocabulary > 256 else (0, self.required.vocabulary)
            length = max(1, min(server.known.block + 2, self.required.longest - number))
            prompt = (low + np.random.default_rng(0).integers(high - low, size=length)).tolist()
            sampled = server.complete(prompt, PROBE_SEED, number, [], SamplingParams(temperature), ASK_SECONDS)
        except (ServerFault, UserError) as problem:
            self._drop(server.url, f"it could not take the weights in {path} (it has to see that folder): {problem}")
            return None
        if self.failed.pop(server.url, None) is not None:
            say(f"{server.url} is back")
        return Answer((tuple(prompt), temperature or 1.0, tuple(sampled.ids)), sampled.logps)

    def _score(self, prompt: Sequence[int], temperature: float, ids: Sequence[int]) -> list[float]:
        """The trained model's log-probabilities of the tokens after a prompt. Called on every process."""
        mask = np.array([0] * len(prompt) + [1] * len(ids), np.float32)
        row = flat_batch([[{"input_ids": np.array([*prompt, *ids]), "loss_mask": mask}]], self.accelerator.device)
        with torch.no_grad(), self.accelerator.autocast():
            return self.unwrapped(row, temperature=temperature).logps[len(prompt) :].tolist()

    def _verify(
        self, answers: dict[str, "Answer"], scores: dict["Asked", list[float]]
    ) -> tuple[dict[str, str], dict[str, str], dict[str, ServerInfo | None]]:
        """Drop servers that did not sample from the current weights. Returns which are dropped, which are absent, and the
        properties of each."""
        ours_exact = self.accelerator.mixed_precision == "no" and base_lm(self.unwrapped.lm).dtype == torch.float32
        for server in self.servers:
            if (answer := answers.get(server.url)) is None:
                continue
            exact = ours_exact and server.known.dtype == "float32"
            ours, before = scores[answer.asked], self.answers.get(server.url)
            off = float(np.abs(np.subtract(ours, answer.logps)).mean())
            if not off <= (CLOSE if exact else CLOSE_ROUNDED):
                self._drop(
                    server.url,
                    "it does not sample from the weights that it was given: the log-probabilities of a probe are "
                    f"{off:.3g} nats off, {CLOSE if exact else CLOSE_ROUNDED} is the most",
                )
            elif before is not None and before == answer:
                moved = float(np.abs(np.subtract(ours, self.scores[answer.asked])).max())
                if moved > (MOVED if exact else MOVED_ROUNDED):
                    self._drop(
                        server.url,
                        "it still samples from the weights of before: it answers a probe as it did then, to the bit, and "
                        f"the model that is trained has moved by {moved:.3g} nats",
                    )
        return self.dropped, self.failed, {server.url: server.known for server in self.servers}

    # --- completions --------------------------------------------------------------------------------------------------

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[tuple[int, ...]],
        *,
        max_new_tokens: int | Sequence[int] | None = None,
        stop_ids: Sequence[int] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        batch_size: int = 0,
    ) -> Future[list[Sampled]]:
        """Sample a completion for each prompt, like `sample`, in the background. Not collective.

        A completion is a function of its key and the weights, whichever server samples it. Log-probabilities are NaN if the
        server's are not those of the whole distribution at the temperature. The future raises UserError if no server is
        left, or a request is refused.
        """
        given = (temperature, top_k, top_p)
        params = SamplingParams(*(own if new is None else new for own, new in zip(self.params, given, strict=True)))
        limits = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        limits = [limits] * len(prompts) if isinstance(limits, int) else list(limits)
        stop_ids = self.unwrapped.stop_ids if stop_ids is None else stop_ids
        seeds = [request_seed(key) for key in keys]
        requests = [Request(*parts) for parts in zip(prompts, seeds, limits, strict=True)]
        future: Future[list[Sampled]] = Future()
        before = list(self.running)
        self.running.append(future)

        def work() -> None:
            wait(before)  # rollouts run one after another
            try:
                future.set_result(self._complete(requests, keys, list(stop_ids), params))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    def _complete(
        self, requests: list[Request], keys: Sequence[tuple[int, ...]], stop_ids: list[int], params: SamplingParams
    ) -> list[Sampled]:
        alive = self._alive()
        if not alive:
            raise self._none_left(self.failed | self.dropped)
        dispatch = Dispatch(requests, self._place(requests, keys, alive), alive, stop_ids, params, self._none_left)
        while True:
            try:
                sampled = dispatch.run()
            finally:
                self._note(dispatch.failed)
            fresh = True
            for server in {id(by): by for by in dispatch.by if by is not None}.values():
                try:
                    found = server.version() if server.url not in dispatch.failed else self.version
                except ServerFault:  # it failed after its last completion
                    continue
                if found != self.version:  # other weights from some point on
                    fresh = False
                    who = "it was started anew" if found == "default" else "another run has given it weights"
                    dispatch.again(server, f"{who}: they have version {found!r}, not {self.version!r}")
            if fresh:
                break
        known = {server: params.gives_logps(server.known.mode) for server in alive}
        return [
            one if known[by] else one._replace(logps=[math.nan] * len(one.ids))
            for one, by in zip(sampled, dispatch.by, strict=True)
        ]

    def _place(self, requests: list[Request], keys: Sequence[tuple[int, ...]], alive: list[Server]) -> list[Server]:
        """The server of each request: the same for all of a prompt, and for all turns of a completion, whose prefix it
        caches."""
        of_prompt: dict[tuple[int, ...], Server] = {}
        first, placed = self.accelerator.process_index, []
        for request, key in zip(requests, keys, strict=True):
            server = self.begun_by.get(tuple(key[:3])) if len(key) > 3 else None
            if server not in alive:
                prompt = tuple(request.prompt)
                server = of_prompt.setdefault(prompt, alive[(first + len(of_prompt)) % len(alive)])
            self.begun_by[tuple(key[:3])] = server
            placed.append(server)
        return placed

    def _note(self, failed: dict[str, str]) -> None:
        new = failed.keys() - self.failed.keys()
        self.failed |= {url: failed[url] for url in new}
        for url in new if self._alive() else ():
            say(f"{url} has failed ({failed[url]}): the other servers take over, with the same seeds")

    def _none_left(self, reasons: dict[str, str]) -> OutsideError:
        told = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
        return OutsideError(
            f"--rollout_server: none is left ({told}): start one with: {start_command(self.servers[0].url, self.required)}; "
            "then the same command goes on from the last checkpoint"
        )

    # --- agreement ----------------------------------------------------------------------------------------------------

    def check(self, metrics: Any) -> None:
        """End the run if the rollout was sampled from a model too far from the trained one. Called on every process, in a
        window that has `sampling/logp_difference`."""
        mean = metrics.window_mean("sampling/logp_difference")
        if mean > MOST_DIFFERENCE:
            told = f"what was sampled is {mean:.2f} nats a token off the model that is trained ({MOST_DIFFERENCE} at most)"
            if self.required.needs_logps:
                raise UserError(
                    f"--rollout_ahead: {told}: it moves too far in one rollout: lower --learning_rate, or do without"
                )
            start = start_command(self.servers[0].url, self.required)
            raise UserError(f"--rollout_server: {told}: its weights are not theirs; start the servers anew: {start}")
