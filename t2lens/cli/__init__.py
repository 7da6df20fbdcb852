"""The command line: `t2lens models | trace | verify | analyze | audit | capture | store | app | train | bench`.

Nothing heavy is imported before a command runs, so that `t2lens --help` answers at once. Bad input gives one sentence
on stderr and exit code 2; files appear complete or not at all. `root` holds the app; each other module, its commands.
"""

from t2lens.cli import analyze as analyze
from t2lens.cli import audit as audit
from t2lens.cli import capture as capture
from t2lens.cli import models as models
from t2lens.cli import run as run
from t2lens.cli import stores as stores
from t2lens.cli import trace as trace
from t2lens.cli.root import app as app
from t2lens.cli.root import main as main
