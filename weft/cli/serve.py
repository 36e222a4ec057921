"""The command that puts models on an address: `weft serve`."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from weft.cli.options import say
from weft.errors import WeftError
from weft.words import many

if TYPE_CHECKING:
    from weft.serve.models import ServedModel

Number = Parameter(negative="")


def serve(
    *runs: str,
    host: str = "127.0.0.1",
    port: Annotated[int, Number] = 8000,
    token: Annotated[str, Parameter(env_var="WEFT_TOKEN", show_default=False)] = "",
    batch: Annotated[int, Number] = 16,
    wait: Annotated[float, Number] = 5.0,
    queue: Annotated[int, Number] = 128,
    megabytes: Annotated[float, Number] = 20.0,
    megapixels: Annotated[float, Number] = 50.0,
    seen_megapixels: Annotated[float, Number] = 1.2,
    seconds: Annotated[float, Number] = 30.0,
    decoders: Annotated[int, Number] = 0,
    device: str = "auto",
) -> None:
    """Serve models: a page to try them, and an HTTP interface with limits.

    Parameters
    ----------
    runs
        Run or model folders, one or several; or demo, a small model of clothes that comes with Weft.
    host
        The address to listen at; any but this machine's own needs a token.
    port
        The port; 0: any that is free.
    token
        What clients must show, as "Authorization: Bearer TOKEN"; better given as WEFT_TOKEN, which others do not see.
    batch
        Pictures that a model looks at together, at most; 1 looks at each by itself.
    wait
        Milliseconds that a picture waits for others which are already being decoded.
    queue
        Pictures in the house at once; further ones are refused with 503 and the time to come again.
    megabytes
        The largest request.
    megapixels
        The largest picture, all its frames together.
    seen_megapixels
        What a model looks at at once, of a picture, which else is shrunk, and of a batch; masks and boxes are answered
        for pictures of up to twelve times as much.
    seconds
        The longest that a request may take to arrive, and again to be answered.
    decoders
        Processes that decode pictures; 0: from the machine.
    device
        auto, cpu, cuda or cuda:N.
    """
    try:
        from weft.serve.server import serve as serve_models
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("weft"):
            raise
        raise WeftError(f"Serving needs {error.name}: pip install weft[serve].") from None

    from weft.serve.settings import MEGABYTE, ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        token=token,
        batch=batch,
        wait=wait / 1000,
        queue=queue,
        max_bytes=round(megabytes * MEGABYTE),
        max_pixels=round(megapixels * 1_000_000),
        seen_pixels=round(seen_megapixels * 1_000_000),
        seconds=seconds,
        decoders=decoders,
    )

    def ready(models: "list[ServedModel]", address: str) -> None:
        for model in models:
            classes = many(len(model.predictor.classes), "class")
            say(f"{model.name}: {model.subject.name}, {classes}, on {model.predictor.device}")
        say(f"Open {address} to try it; {address}docs has the interface. Ctrl-C stops.")

    serve_models(runs, settings, device, ready)
    say("Stopped.")
