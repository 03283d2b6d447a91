"""The models behind one gateway, each with its own workers and metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from twinfire import __version__
from twinfire.gateway.backends.backend import Backend
from twinfire.gateway.errors import not_ready, unknown_model
from twinfire.gateway.metrics import Metrics
from twinfire.gateway.served_model import ServedModel, TextSide
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import WorkerInfo


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that can serve a request now."""

    name: str
    """As the client called it."""
    text: TextSide
    worker: WorkerInfo
    backend: Backend
    metrics: Metrics

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that fit."""
        return self.worker.max_model_len

    @property
    def fingerprint(self) -> str:
        """Equal for workers that draw equal tokens from equal seeds."""
        worker = self.worker
        identity = f"{__version__}/{worker.model}/{worker.architecture}/{worker.dtype}"
        return "fp_" + sha256(identity.encode()).hexdigest()[:12]

    @property
    def max_text_bytes(self) -> int:
        """A longer text cannot fit, whatever its tokens are."""
        return self.worker.max_model_len * self.text.vocabulary.longest_token_bytes


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model, whoever computes it, and what is counted of it."""

    model: ServedModel
    backend: Backend
    metrics: Metrics

    @classmethod
    def of(
        cls, model: ServedModel, backend: Backend, metrics: Metrics | None = None
    ) -> HostedModel:
        """Return the model with metrics of its own, unless something else feeds `metrics` too."""
        return cls(model, backend, metrics or Metrics(model.names[0]))

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now, None when one can."""
        return self.backend.unready_reason or self.model.unready_reason

    def ready(self, name: str) -> ReadyModel:
        """Return what serves a request that calls the model `name`; 503 with the reason."""
        reason, worker, text = self.unready_reason, self.backend.worker_info, self.model.text
        if reason is not None or worker is None or text is None:
            raise not_ready(reason or "the worker is not ready")
        return ReadyModel(name, text, worker, self.backend, self.metrics)


class HostedModels:
    """All models of a gateway, by their public names."""

    def __init__(
        self,
        hosted: Sequence[HostedModel],
        aliases: Mapping[str, str] | None = None,
        elsewhere: Collection[str] = (),
    ) -> None:
        """`aliases` gives more names to models, which answer by the name that was asked for.

        `elsewhere` are names of models that others serve, whose aliases are left to them.
        InvalidRequest when two models have a name in common, and for an alias that is a model's
        name or that stands for none.
        """
        self._hosted = tuple(hosted)
        self._by_name: dict[str, HostedModel] = {}
        for one in hosted:
            for name in one.model.names:
                if name in self._by_name:
                    raise InvalidRequest(f"two models are called `{name}`", "names")
                self._by_name[name] = one
        named = dict(self._by_name)
        for alias, name in (aliases or {}).items():
            if alias in named or alias in elsewhere:
                raise InvalidRequest(f"the alias `{alias}` is a model's own name", "aliases")
            if name in elsewhere and name not in named:
                continue
            if name not in named:
                known = ", ".join(f"`{known}`" for known in (*named, *elsewhere))
                raise InvalidRequest(
                    f"the alias `{alias}` stands for `{name}`, which is not served; there are "
                    f"{known}",
                    "aliases",
                )
            self._by_name[alias] = named[name]

    def __iter__(self) -> Iterator[HostedModel]:
        return iter(self._hosted)

    @property
    def by_name(self) -> Mapping[str, HostedModel]:
        """Every public name with its model, in order."""
        return self._by_name

    def unready_reasons(self) -> dict[str, str]:
        """Return the models that cannot be served, each with the reason."""
        reasons = {one.model.names[0]: one.unready_reason for one in self._hosted}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def ready(self, name: str) -> ReadyModel:
        """Return what serves a request for `name`.

        404 for a name that nobody has, 503 with the reason while it cannot be served.
        """
        if name not in self._by_name:
            raise unknown_model(name)
        return self._by_name[name].ready(name)
