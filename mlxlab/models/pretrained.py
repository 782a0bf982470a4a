"""Any checkpoint that mlx-lm can load: a local folder or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxlab.errors import ConfigError
from mlxlab.interfaces import ModelSource


@dataclass(frozen=True)
class Pretrained(ModelSource):
    """A folder in MLX or Hugging Face format, or the id of one on the hub (fetched through mlx-lm's own cache).

    Args:
        path: local folder (relative to where the program is started), or hub id such as "mlx-community/...".
    """

    path: str

    def folder(self) -> Path:
        return self._fetch()

    def tokenizer_folder(self) -> Path:
        return self._fetch(["*.json", "*.txt", "*.jsonl", "*.jinja", "*.tiktoken", "tokenizer.model", "*.py"])

    def _fetch(self, only: list[str] | None = None) -> Path:
        """The local folder; of a hub model all files that mlx-lm wants, or those of some patterns."""
        local = Path(self.path).expanduser()
        if local.is_dir():
            return local.resolve()
        if local.is_absolute() or self.path.startswith((".", "~")) or self.path.count("/") != 1:
            raise ConfigError(f"model.path={self.path} is not a folder; give a model folder or a hub id (owner/name).")
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
        from mlx_lm.utils import _download

        try:
            return Path(_download(self.path, allow_patterns=only))
        except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"model.path={self.path} is neither a local folder nor a hub model that can be fetched now ({reason}); "
                "check the spelling and the connection, or give a local folder."
            ) from error
