"""Methods that vLLM adds to its workers; the tests call them through ``collective_rpc``."""

from __future__ import annotations

from typing import Any


class Probe:
    """What the tests ask a worker."""

    def anymla_use_backend(self, name: str) -> int:
        """Have every operation of the model run on that backend; how many modules it took."""
        if name == "triton":
            from crossrun.interpreter import install

            install()
        took = [module for module in self._anymla_model().modules() if hasattr(module, "backend")]
        for module in took:
            module.backend = name
        return len(took)

    def anymla_compare(self) -> None:
        """Compute everything with vLLM's kernels as well, from now on."""
        import compare

        compare.compare(self._anymla_model())

    def anymla_record(self) -> None:
        """Keep the first steps that are compared from now on."""
        import record

        record.start(self._anymla_model())

    def anymla_save(self, path: str) -> int:
        """Write what was kept; how many bytes it takes."""
        import record

        return record.save(path)

    def anymla_report(self) -> list[dict[str, Any]]:
        """What the comparison found."""
        import compare

        return compare.report()

    def anymla_leave_unwritten(self, first: int, end: int) -> None:
        """From now on index keys of positions [first, end) are not written."""
        import faults

        self._anymla_mend = faults.index_keys_missing(first, end)

    def anymla_mend(self) -> None:
        """They are written again."""
        self._anymla_mend()

    def anymla_classes(self) -> dict[str, int]:
        """How many modules of each class the model has."""
        names = [type(module).__name__ for module in self._anymla_model().modules()]
        return {name: names.count(name) for name in sorted(set(names))}

    def _anymla_model(self) -> Any:
        return self.model_runner.get_model()
