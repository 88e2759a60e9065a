# SPDX-License-Identifier: Apache-2.0
"""Buckets of moto's server, which checks signatures with Amazon's own code."""

import http.client
import json
import os
import re
import subprocess
import sys
import unittest

from servers import Moto, ROOT

import harness
import remote_sources
from remote_sources import DATA, LIBRARY, Remote

MANY = 2_300  # Keys of one prefix: three pages of a listing.


def setUpModule():
    global moto, key
    remote_sources.setUpModule()
    moto = Moto(DATA)
    moto.__enter__()
    unittest.addModuleCleanup(moto.__exit__)
    moto.put("bucket", b"")
    for source in ("STORE", "BIG", "hf", "dcp"):
        moto.upload(DATA / source, f"bucket/{source}")
    for name in ("m.safetensors", "big.safetensors"):
        moto.put(f"bucket/{name}", (DATA / name).read_bytes())
    moto.put("bucket/public.safetensors", (DATA / "m.safetensors").read_bytes(), {"x-amz-acl": "public-read"})
    moto.put("bucket/empty.safetensors", b"")
    for name in Keys.STRANGE:
        moto.upload(DATA / "STORE", f"bucket/{name}/STORE")
    connection = http.client.HTTPConnection("127.0.0.1", moto.port, timeout=60)
    for i in range(MANY):
        moto.put(f"bucket/many/a-{i:07}.txt", b"x", connection=connection)
    moto.upload(DATA / "hf", "bucket/many")  # Names that come last.
    allow = json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]})
    deny = allow.replace('"*"', '"arn:aws:s3:::elsewhere/*"')
    key["reader"] = moto.make_user("reader", allow)
    key["stranger"] = moto.make_user("stranger", deny)
    text = moto.iam(Action="CreateRole", RoleName="role", AssumeRolePolicyDocument=allow)
    key["role"] = re.search("<Arn>(.*?)</Arn>", text)[1]
    moto.iam(Action="PutRolePolicy", RoleName="role", PolicyName="all", PolicyDocument=allow)
    text = moto.iam("sts", Action="AssumeRole", RoleArn=key["role"], RoleSessionName="session", Version="2011-06-15")
    key["session"] = tuple(re.search(f"<{name}>(.*?)</{name}>", text)[1]
                           for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))


moto, key = None, {}


class OverMoto(Remote):
    def setUp(self):
        super().setUp()
        self.env = self.signed(*key["reader"])

    def signed(self, id, secret, token=None):
        return {"AWS_ENDPOINT_URL": moto.url, "AWS_ACCESS_KEY_ID": id, "AWS_SECRET_ACCESS_KEY": secret,
                **({"AWS_SESSION_TOKEN": token} if token else {})}

    def run_tool(self, *args, **more):
        more["env"] = self.env if more.get("env") is None else more["env"]
        result = super().run_tool(*args, **more)
        for secret in (key["reader"][1], key["session"][1], key["session"][2]):
            for text in (result.stdout, result.stderr):
                self.assertNotIn(secret if isinstance(text, str) else secret.encode(), text)
        return result


class Anonymous(OverMoto):
    """Before signatures are checked (moto has no anonymous reads later): runs first."""

    def test_public_object_is_read_without_keys(self):
        env = {"AWS_ENDPOINT_URL": moto.url}
        self.same("m.safetensors", "ls", url="s3://bucket/public.safetensors", env=env)
        self.same("m.safetensors", "cat", "w", url="s3://bucket/public.safetensors",
                  env={**self.env, "AWS_NO_SIGN_REQUEST": "1"})

    def test_private_object_is_refused_without_keys(self):
        result = self.run_tool("ls", "s3://bucket/m.safetensors", expect=2, env={"AWS_ENDPOINT_URL": moto.url})
        self.assertRegex(result.stderr, "^tensormount: PERMISSION_DENIED: .*403 Forbidden.*was not signed")


    def test_web_identity(self):
        """moto's STS gives keys for any token, and wants a signature as soon as it checks them."""
        (self.dir / "token").write_text("eyJ.abc.def\n")
        env = {"AWS_ENDPOINT_URL": moto.url, "AWS_ENDPOINT_URL_STS": moto.url, "AWS_ROLE_ARN": key["role"],
               "AWS_WEB_IDENTITY_TOKEN_FILE": str(self.dir / "token")}
        self.same("STORE/step-1", "cat", "w", url="s3://bucket/STORE/step-1", env=env)


class Checked(OverMoto):
    @classmethod
    def setUpClass(cls):
        moto.check_signatures()


class Keys(Checked):
    STRANGE = ["a b", "50%", "a+b", "%41", "Gewicht-ä-重み", "x&y=<z>'\"", "tilde~(x)!*", "comma,semi;colon:at@"]

    def test_every_command_prints_the_same(self):
        for source in self.SOURCES:
            url = f"s3://bucket/{source}"
            self.same(source, "ls", "-l", url=url)
            self.same(source, "info", url=url, mask=rb"uuid +[0-9a-f]{32}")
            self.same(source, "cat", "model.rows" if source == "dcp" else "w[3:9]", url=url)
            self.same(source, "verify", url=url)
            self.run_tool("diff", url, DATA / source)
            for name, place in (("local", DATA / source), ("remote", url)):
                self.run_tool("export", place, self.dir / name, "--to", "safetensors", "--if-exists", "replace")
            self.assertEqual((self.dir / "remote").read_bytes(), (self.dir / "local").read_bytes(), source)
            self.run_tool("load", url, "--ranks", "2", "--shard", "cols", "--compare", DATA / source)

    def test_large_tensors(self):
        local = self.run_tool("cat", DATA / "big.safetensors", "w", text=False).stdout
        for source in ("BIG/step-1", "big.safetensors"):
            self.assertEqual(self.run_tool("cat", f"s3://bucket/{source}", "w", text=False).stdout, local)

    def test_store_is_listed_and_copied(self):
        self.same("STORE", "ls", url="s3://bucket/STORE")
        self.same("STORE", "info", url="s3://bucket/STORE")
        self.same("STORE/latest", "cat", "w", url="s3://bucket/STORE/latest")
        self.run_tool("copy", "s3://bucket/STORE/step-1", self.dir / "here")
        self.run_tool("verify", self.dir / "here" / "step-1")
        self.run_tool("diff", self.dir / "here" / "step-1", DATA / "STORE" / "step-1")

    def test_listing_of_three_pages(self):
        self.same("hf", "ls", "-l", url="s3://bucket/many")
        self.same("hf", "cat", "w", url="s3://bucket/many")

    def test_strange_keys(self):
        for name in self.STRANGE:
            with self.subTest(name):
                self.same("STORE", "ls", url=f"s3://bucket/{name}/STORE")
                self.same("STORE/step-1", "cat", "w", url=f"s3://bucket/{name}/STORE/step-1")

    def test_missing_and_empty_objects(self):
        self.fails("ls", "s3://bucket/none.safetensors", code="NOT_FOUND", says="s3://bucket/none.safetensors")
        self.fails("ls", "s3://bucket/none", code="NOT_FOUND", says="s3://bucket/none")
        self.fails("ls", "s3://no-such-bucket/x", code="NOT_FOUND", says="s3://no-such-bucket/x")
        self.fails("ls", "s3://bucket/empty.safetensors", code="DATA_LOSS", says="a file of 0 bytes is too short")

    def test_python_reads_the_same(self):
        script = ("import sys, tensormount as tm\nwith tm.open(sys.argv[1]) as a, tm.open(sys.argv[2]) as b:\n"
                  "    assert sorted(a) == sorted(b) and len(a) > 3\n"
                  "    for key in a:\n"
                  "        if 'fp' not in key: assert a[key][...].tobytes() == b[key][...].tobytes(), key\n")
        env = {**os.environ, **self.env, "PYTHONPATH": str(ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY)}
        for source in ("STORE/latest", "m.safetensors"):
            subprocess.run([sys.executable, "-B", "-c", script, f"s3://bucket/{source}", str(DATA / source)],
                           env=env, check=True, timeout=60)


class Copies(Checked):
    """Written to moto by signed requests; it checks the conditions, but no checksums."""

    def test_store_is_copied_there_and_back(self):
        self.run_tool("copy", DATA / "STORE", "s3://bucket/copied/STORE")
        self.same("STORE", "ls", url="s3://bucket/copied/STORE")
        for step in ("step-1", "step-2"):
            self.same(f"STORE/{step}", "verify", url=f"s3://bucket/copied/STORE/{step}")
            self.run_tool("diff", f"s3://bucket/copied/STORE/{step}", DATA / "STORE" / step)
        self.run_tool("copy", "s3://bucket/copied/STORE/step-1", self.dir / "back")
        self.run_tool("diff", self.dir / "back" / "step-1", DATA / "STORE" / "step-1")
        self.run_tool("rm", "s3://bucket/copied/STORE/step-1")
        self.assertNotIn("step-1", self.run_tool("ls", "s3://bucket/copied/STORE").stdout)
        self.same("STORE/step-2", "verify", url="s3://bucket/copied/STORE/step-2")

    def test_large_objects_in_parts(self):
        self.run_tool("copy", DATA / "BIG", "s3://bucket/copied/BIG")
        self.assertEqual(self.run_tool("cat", "s3://bucket/copied/BIG/step-1", "w", text=False).stdout,
                         self.run_tool("cat", DATA / "BIG/step-1", "w", text=False).stdout)
        self.same("BIG/step-1", "verify", url="s3://bucket/copied/BIG/step-1")

    def test_two_writers_have_one_winner(self):
        env = {**os.environ, **self.env}
        self.run_tool("import", DATA / "other.safetensors", self.dir / "OTHER" / "step-1")
        sources = (DATA / "STORE" / "step-1", self.dir / "OTHER" / "step-1")
        wins = 0
        for turn in range(8):
            store = f"s3://bucket/race-{turn}/STORE"
            writers = [subprocess.Popen([harness.TOOL, "copy", source, store], env=env, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE) for source in sources]
            errors = [writer.communicate(timeout=60)[1] for writer in writers]
            winners = [source for source, writer in zip(sources, writers) if writer.returncode == 0]
            self.assertLessEqual(len(winners), 1, errors)
            for writer, error in zip(writers, errors):
                if writer.returncode != 0:
                    self.assertRegex(error, b"BUSY|ALREADY_EXISTS")
            for winner in winners:
                wins += 1
                self.run_tool("verify", f"{store}/step-1")
                self.run_tool("diff", f"{store}/step-1", winner)
        print(f"of two writers one won {wins} times of 8")
        self.assertGreater(wins, 0)

    def test_wrong_keys_write_nothing(self):
        result = self.run_tool("copy", DATA / "STORE", "s3://bucket/refused/STORE", expect=2,
                               env=self.signed(key["reader"][0], "wrong"))
        self.assertRegex(result.stderr, "PERMISSION_DENIED: .*SignatureDoesNotMatch")
        self.fails("ls", "s3://bucket/refused/STORE", code="NOT_FOUND", says="s3://bucket/refused/STORE")


class Refusals(Checked):
    def refused(self, env, says):
        for command, source in (("ls", "STORE"), ("ls", "STORE/step-1"), ("cat", "m.safetensors"), ("ls", "m.safetensors")):
            args = [command, f"s3://bucket/{source}"] + (["w"] if command == "cat" else [])
            result = self.run_tool(*args, expect=2, env=env)
            self.assertRegex(result.stderr, f"^tensormount: PERMISSION_DENIED: .*{says}")

    def test_wrong_secret(self):
        self.refused(self.signed(key["reader"][0], "wrong"), "403 Forbidden.*SignatureDoesNotMatch")

    def test_unknown_key(self):
        self.refused(self.signed("AKIAUNKNOWN", "wrong"), "403 Forbidden.*InvalidAccessKeyId")

    def test_user_without_permission(self):
        self.refused(self.signed(*key["stranger"]), "403 Forbidden.*AccessDenied")

    def test_wrong_session_token(self):
        self.refused(self.signed(*key["session"][:2], "wrong"), "400 Bad Request.*InvalidToken")


class Sessions(Checked):
    def test_session_token(self):
        self.same("STORE", "ls", url="s3://bucket/STORE", env=self.signed(*key["session"]))
        self.same("STORE/step-1", "cat", "w", url="s3://bucket/STORE/step-1", env=self.signed(*key["session"]))


if __name__ == "__main__":
    harness.main()
