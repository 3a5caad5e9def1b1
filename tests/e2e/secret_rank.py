"""A rank with a secret as a variable and one as a file: writes digests of both, and prints them after a signal.

`secret_rank.py FOLDER NAME CODE` waits for FOLDER/NAME.go, and exits with CODE.
"""

import base64
import hashlib
import json
import os
import pathlib
import stat
import sys
import time

folder, name, code = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
file = pathlib.Path(os.environ["EBBTIDE_SECRETS_DIR"]) / "deploy-key"
values = [os.environ["HF_TOKEN"].encode(), file.read_bytes()]
status = file.stat()
seen = {
    "digests": [hashlib.sha256(value).hexdigest() for value in values],
    "mode": stat.S_IMODE(status.st_mode),
    "is_own": status.st_uid == os.geteuid(),
}
(folder / f"{name}.part").write_text(json.dumps(seen))
(folder / f"{name}.part").rename(folder / f"{name}.json")
while not (folder / f"{name}.go").exists():
    time.sleep(0.05)
for value in values:
    sys.stdout.write(f"value {value.decode()}\n")
    sys.stdout.flush()
    sys.stdout.write(f"{value.decode()[:9]}")
    sys.stdout.flush()
    time.sleep(1.2)  # longer than the period in which output is sent
    sys.stdout.write(f"{value.decode()[9:]} in two parts, {base64.b64encode(value).decode()}\n")
sys.stdout.flush()
sys.exit(code)
