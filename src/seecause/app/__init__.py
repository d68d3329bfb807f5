"""`seecause serve`: the web app. Everything runs on the models that it was started with.

    server.py     routes, and files for the browser; middleware.py  access control
    state.py      served models, images and recorded runs; the context of an action
    sessions.py   the images, files and jobs of each user
    jobs.py       a fair queue with a few workers for each model
    given.py      datasets that are given in the page
    panels/       one module for each panel; static/ one ES module for each panel, no build step

How a panel is added (`panels/explain.py` and `static/panel-explain.js` are the examples):

1. `panels/NAME.py` with pure functions from a checked request to a reply that JSON can represent:

       class Brush(OnPicture):                # fields: model, picture (panels/__init__.py)
           patches: Patches = ()

       def brush(context: ActionContext, request: Brush) -> Reply: ...

       PANEL = Panel("explain", "Explain", "Which patches caused the prediction?",
                     actions=(look, draw, brush, copy), kinds=("classifier",))

   Replies of `kept` actions (audits, repairs) stay on the server under an id that links name.

   `context` (state.py) is all that an action may use: the view of the model, images of this
   session as tensors, their recorded runs, and `context.progress(share, words)`. A long
   action needs nothing else to be stoppable: every walk over blocks checks whether to stop.
   Other jobs may run at the same time: `context.model` is this job's own view of shared weights.
   Raise errors of `errors.py`; others reach the user as one sentence without details.
   `copy(context, request)` returns {"python": ...}, lines that do the same without the page.
   A field called `model` names the queue that a request waits in; without one it is the server's.

2. Name it in `PANELS` (panels/__init__.py): the first four are the path, the others are tools.

3. `static/panel-NAME.js` exports `panel = {defaults, perImage, mount(root, tools)}`. Model and
   image are shared by all panels; fields in `perImage` are reset with the image. `defaults` are the
   fields of the panel's part of the state; state.js writes those that differ into the URL's hash.
   `mount` builds the panel once and returns `{update(state, changed)}`, which is called with every
   new state, also when a link is opened. `tools` has `set(changes)`, `go(panel)`,
   `ask(action, request, {slot})`, `hello`, and the parts that panels share (parts.js): images
   with a grid of patches, predictions as bars, the image tray, the progress of jobs, copy buttons.
   What comes late has its place kept (`waiting` in app.css), so that nothing moves under a pointer.

4. Tests: `tests/app/test_NAME.py` calls the functions; `tests/app/test_browser.py` has one test of
   the panel's main action, on numbers.
"""

from importlib.util import find_spec

from seecause.errors import MissingExtra

if find_spec("fastapi") is None:
    raise MissingExtra("fastapi", "app")
