"""A plug-in for FiftyOne's app: `sc.integrations.fiftyone_plugin.install()`, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seecause.files import write_atomic
from seecause.integrations.fiftyone import audit, explain, need_fiftyone, worst

NAME = "@seecause/maps"


def install(folder: str | Path | None = None) -> Path:
    """Write the plug-in's two files into FiftyOne's folder of plug-ins, or another."""
    place = Path(folder or need_fiftyone().config.plugins_dir) / "seecause"
    place.mkdir(parents=True, exist_ok=True)
    operators = "[explain_pictures, show_worst_pictures]"
    write_atomic(place / "fiftyone.yml", f'name: "{NAME}"\noperators: {operators}\n')
    write_atomic(place / "__init__.py", f"from {__name__} import register as register\n")
    return place


def register(plugin: Any) -> None:
    """As FiftyOne calls it when it reads the plug-in."""
    need_fiftyone()
    import fiftyone.operators as operators  # type: ignore[import-not-found]
    from fiftyone.operators import types  # type: ignore[import-not-found]

    class ExplainPictures(operators.Operator):
        """Heatmaps of the pictures in the view."""

        @property
        def config(self) -> Any:
            return operators.OperatorConfig(
                name="explain_pictures", label="seecause: which patches caused the answers?"
            )

        def resolve_input(self, ctx: Any) -> Any:
            inputs = types.Object()
            inputs.str("model", label="Model (builtin:, timm:, hf:, or a folder)", required=True)
            inputs.str("method", label="Method", default="caap")
            return types.Property(inputs)

        def execute(self, ctx: Any) -> dict[str, Any]:
            from seecause.loading import load

            model, method = load(ctx.params["model"]), ctx.params.get("method", "caap")
            explain(ctx.view, model, method)
            ctx.ops.reload_dataset()
            return {"pictures": len(ctx.view)}

    class ShowWorstPictures(operators.Operator):
        """Audits the view, and shows the pictures whose answers follow the background most."""

        @property
        def config(self) -> Any:
            return operators.OperatorConfig(
                name="show_worst_pictures", label="seecause: which answers follow the background?"
            )

        def resolve_input(self, ctx: Any) -> Any:
            inputs = types.Object()
            inputs.str("model", label="Model (builtin:, timm:, hf:, or a folder)", required=True)
            inputs.str("labels", label="Field of classes", default="ground_truth")
            inputs.str("masks", label="Field of segmentations of the objects")
            inputs.str("eye", label="Or another model that finds them (timm:NAME)")
            return types.Property(inputs)

        def execute(self, ctx: Any) -> dict[str, Any]:
            from seecause.loading import load

            model, fields = load(ctx.params["model"]), ctx.params
            labels = fields.get("labels", "ground_truth")
            result = audit(
                ctx.view, model, labels=labels, masks=fields.get("masks"), eye=fields.get("eye")
            )
            ctx.ops.set_view(worst(ctx.view))
            return {"verdict": result.verdict, **result.numbers()}

    plugin.register(ExplainPictures)
    plugin.register(ShowWorstPictures)
