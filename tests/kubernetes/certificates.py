"""A certificate authority for one test session, created with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
DAYS = "2"


class Authority:
    """A certificate authority that keeps `ca.crt`, `ca.key` and everything it signs in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        _openssl(
            "req", "-x509", *KEY, "-days", DAYS, "-subj", "/CN=test-authority",
            "-keyout", str(self.key("ca")), "-out", str(self.certificate("ca")),
        )  # fmt: skip

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def sign(self, name: str, *, subject: str, extensions: str) -> None:
        """Create `name`.key and `name`.crt."""
        request, text = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        text.write_text(extensions + "\n")
        _openssl("req", *KEY, "-subj", subject, "-keyout", str(self.key(name)), "-out", str(request))
        _openssl(
            "x509", "-req", "-in", str(request), "-days", DAYS, "-extfile", str(text), "-CAcreateserial",
            "-CA", str(self.certificate("ca")), "-CAkey", str(self.key("ca")), "-out", str(self.certificate(name)),
        )  # fmt: skip

    def sign_server(self, name: str, *hosts: str) -> None:
        self.sign(
            name, subject=f"/CN={name}", extensions=f"subjectAltName={','.join(hosts)}\nextendedKeyUsage=serverAuth"
        )

    def sign_user(self, name: str, *, groups: tuple[str, ...] = ()) -> None:
        """Create a client certificate. Kubernetes reads the user from CN and the groups from O."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={name}"
        self.sign(name, subject=subject, extensions="extendedKeyUsage=clientAuth")

    def make_signing_key(self, name: str) -> None:
        """Create an RSA key pair to sign tokens with: `name`.key, and `name`.crt with the public half."""
        _openssl("genrsa", "-out", str(self.key(name)), "2048")
        _openssl("rsa", "-in", str(self.key(name)), "-pubout", "-out", str(self.certificate(name)))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
