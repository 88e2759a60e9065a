# SPDX-License-Identifier: Apache-2.0
"""Checkpoints behind s3, gs and hf, over the stand-in servers of tests/support/object_server.py."""

import json
import os
import re
import shutil
import stat
import time

import harness
import object_server
from object_server import Answer, ObjectServer
from remote_sources import DATA, Remote, SECRET, TOKEN, linked, setUpModule  # noqa: F401


class Bucket(Remote):
    """What tests of S3 share."""

    def setUp(self):
        super().setUp()
        self.folder = self.dir / "www"
        for source in ("STORE", "m.safetensors", "hf", "dcp"):
            linked(DATA / source, self.folder / "bucket" / source)
        self.server = self.serve(self.folder, s3=True)
        self.env = {"AWS_ENDPOINT_URL": self.server.url, "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET}

    def run_tool(self, *args, **more):
        more["env"] = self.env if more.get("env") is None else more["env"]
        result = super().run_tool(*args, **more)
        for text in (result.stdout, result.stderr):  # Whatever it says, it says no secret.
            for secret in (SECRET, "SESSIONTOKEN", "WEBIDENTITY"):
                self.assertNotIn(secret if isinstance(text, str) else secret.encode(), text)
        return result

    def without_keys(self, **more):
        return {"AWS_ENDPOINT_URL": self.server.url, **more}

    def signed_by(self):
        """The ids of the keys that requests were signed with."""
        return {re.search("Credential=([^/]+)/", r.headers.get("Authorization", "Credential=none/"))[1]
                for r in self.server.requests}


class S3(Bucket):
    def test_every_command_prints_the_same(self):
        for source in self.SOURCES:
            url = f"s3://bucket/{source}"
            self.same(source, "ls", "-l", url=url)
            self.same(source, "info", url=url, mask=rb"uuid +[0-9a-f]{32}")
            self.same(source, "cat", "model.rows" if source == "dcp" else "w[3:9]", url=url)
            if source != "STORE/step-1":
                self.same(source, "verify", url=url)
            self.assertIn("no difference", self.run_tool("diff", url, DATA / source).stdout)
        self.run_tool("export", "s3://bucket/STORE/step-1", self.dir / "x", "--to", "safetensors")
        self.run_tool("load", self.dir / "x", "--compare", DATA / "m.safetensors")
        self.assertEqual(self.signed_by(), {"AKIDEXAMPLE"})
        self.assertFalse([r for r in self.server.requests if r.status in (400, 403)])

    def test_verify_of_own_checkpoint_prints_the_same(self):
        self.same("STORE/step-1", "verify", url="s3://bucket/STORE/step-1")

    def test_store_is_listed(self):
        # The uuid is that of the checkpoint: these are our own.
        self.same("STORE", "ls", url="s3://bucket/STORE")
        self.same("STORE", "ls", url="s3://bucket/STORE/")
        self.same("STORE", "info", url="s3://bucket/STORE")
        self.same("STORE/latest", "ls", url="s3://bucket/STORE/latest")
        self.same("STORE/latest", "cat", "w", url="s3://bucket/STORE/latest")
        self.assertEqual(self.run_tool("cat", "s3://bucket/STORE", "w", text=False).stdout,
                         self.run_tool("cat", DATA / "STORE/step-2", "w", text=False).stdout)
        self.assertIn("no difference", self.run_tool("diff", "s3://bucket/STORE/latest", DATA / "other.safetensors").stdout)

    def test_listings_come_in_pages(self):
        self.server.page = 3
        self.same("STORE", "ls", url="s3://bucket/STORE")
        many = self.folder / "bucket" / "many"
        for i in range(8):
            shutil.copytree(DATA / "hf", many / f"iter_{i:07}", copy_function=os.link)
        (many / "latest_checkpointed_iteration.txt").write_text("7")
        self.server.forget()
        lines = self.run_tool("ls", "s3://bucket/many").stdout.splitlines()
        self.assertEqual([line.split("\t")[0] for line in lines], [f"iter_{i:07}" for i in range(8)])
        pages = [r.query for r in self.server.requests if "prefix=many%2F&" in r.query + "&"]
        self.assertEqual(["continuation-token=" in query for query in pages], [False, True, True])

    def test_repeated_page_is_refused(self):
        self.server.page = 1

        def again(answer):
            answer.body = re.sub(b"<NextContinuationToken>.*?</", b"<NextContinuationToken>c3R1Y2s=</", answer.body)
            answer.body = answer.body.replace(b"<IsTruncated>false", b"<NextContinuationToken>c3R1Y2s=</NextContinuationToken>"
                                              b"<IsTruncated>true")
        again.name = "again"
        self.server.fault = lambda number, path, range: again if range is None else None
        self.fails("ls", "s3://bucket/STORE", code="DATA_LOSS", says="lists the same entries again")
        self.assertGreater(self.server.faults()["again"], 1)

    def test_markers_of_folders_are_no_checkpoints(self):
        self.server.markers = {"STORE/", "STORE/step-1/", "STORE/.trash/"}
        self.same("STORE", "ls", url="s3://bucket/STORE")
        self.same("STORE/step-1", "ls", url="s3://bucket/STORE/step-1")

    def test_empty_object_is_reported_like_an_empty_file(self):
        # S3 tells the size only in the body of the error.
        self.server.fault = lambda number, path, range: object_server.status(
            416, {}, b"<Error><Code>InvalidRange</Code><ActualObjectSize>0</ActualObjectSize></Error>") if range else None
        (self.folder / "bucket" / "empty.safetensors").touch()
        self.fails("ls", "s3://bucket/empty.safetensors", code="DATA_LOSS", says="a file of 0 bytes is too short")

    def test_strange_keys_are_read(self):
        for name in ("a b", "50%", "a+b", "%41", "Gewicht-ä-重み", "x&y=<z>'\""):
            linked(DATA / "STORE", self.folder / "bucket" / name / "STORE")
        self.server.space = "%20"
        for name in ("a b", "50%", "a+b", "%41", "Gewicht-ä-重み", "x&y=<z>'\""):
            with self.subTest(name):
                self.same("STORE", "ls", url=f"s3://bucket/{name}/STORE")
                self.same("STORE/step-1", "cat", "w", url=f"s3://bucket/{name}/STORE/step-1")
        self.assertFalse([r for r in self.server.requests if r.status == 403])

    def test_spaces_that_listings_write_as_plus(self):
        linked(DATA / "STORE", self.folder / "bucket" / "a b" / "STORE")
        self.same("STORE", "ls", url="s3://bucket/a b/STORE")

    def test_failures_name_the_reason(self):
        wrong = {**self.env, "AWS_SECRET_ACCESS_KEY": "WRONGSECRET"}
        for url in ("s3://bucket/STORE", "s3://bucket/STORE/step-1", "s3://bucket/m.safetensors"):
            result = self.run_tool("ls", url, expect=2, env=wrong)
            self.assertRegex(result.stderr, "^tensormount: PERMISSION_DENIED: .*403 Forbidden .SignatureDoesNotMatch")
            self.assertNotIn("WRONGSECRET", result.stderr)
            self.assertIn("environment", result.stderr)
        result = self.run_tool("ls", "s3://bucket/STORE", expect=2, env=self.without_keys())
        self.assertRegex(result.stderr, "PERMISSION_DENIED: .*no credentials were found")
        self.fails("ls", "s3://nobucket/STORE", code="NOT_FOUND", says="s3://nobucket/STORE")
        self.fails("ls", "s3://bucket/none", code="NOT_FOUND", says="s3://bucket/none")
        self.fails("ls", "s3://bucket/none.safetensors", code="NOT_FOUND", says="s3://bucket/none.safetensors")
        self.fails("ls", "s3:///STORE", code="INVALID_ARGUMENT", says="bucket")

    def test_wrong_session_token_is_a_matter_of_permission(self):
        env = {**self.env, "AWS_SESSION_TOKEN": "SESSIONTOKEN"}
        result = self.run_tool("ls", "s3://bucket/STORE", expect=2, env=env)
        self.assertIn("InvalidToken", result.stderr)
        self.assertIn("PERMISSION_DENIED", result.stderr)

    def test_requests_are_not_signed_if_told_so(self):
        self.server.public = True
        for env in (self.without_keys(), {**self.env, "AWS_NO_SIGN_REQUEST": "1"}):
            self.server.forget()
            self.same("STORE", "ls", url="s3://bucket/STORE", env=env)
            self.assertEqual(self.signed_by(), {"none"})

    def test_session_token_is_signed(self):
        self.server.keys = {"AKIDEXAMPLE": (SECRET, "SESSIONTOKEN")}
        env = {**self.env, "AWS_SESSION_TOKEN": "SESSIONTOKEN"}
        self.same("STORE", "ls", url="s3://bucket/STORE", env=env)
        self.run_tool("ls", "s3://bucket/STORE", "--log-level", "debug", "-v", env=env)

    def test_google_storage_is_read_through_its_interface_for_s3(self):
        self.server.region = "auto"
        self.same("STORE", "ls", url="gs://bucket/STORE")
        self.same("m.safetensors", "cat", "w", url="gs://bucket/m.safetensors")

    def test_region_is_learnt_from_the_bucket(self):
        self.server.region = "eu-west-1"
        self.same("STORE", "ls", url="s3://bucket/STORE", env={**self.env, "AWS_REGION": "eu-west-1"})
        self.assertFalse([r for r in self.server.requests if r.status == 400])
        self.same("STORE", "ls", url="s3://bucket/STORE")
        self.assertTrue([r for r in self.server.requests if r.status == 400])

    def test_region_is_learnt_from_a_file(self):
        self.server.region = "eu-west-1"
        self.same("m.safetensors", "ls", url="s3://bucket/m.safetensors")

    def test_overload_is_tried_again(self):
        self.server.fault = lambda number, path, range: (
            object_server.status(503, {"Retry-After": "0"}, b"<Error><Code>SlowDown</Code></Error>")
            if number % 2 else None)
        self.same("STORE", "ls", url="s3://bucket/STORE")
        self.assertGreaterEqual(self.server.faults()["status"], 2)


class Credentials(Bucket):
    """Where credentials are found. Stand-ins for the services of AWS are ObjectServers with an `answer`."""

    def key(self, name, token=""):
        """A new key that the server takes."""
        self.server.keys[name] = (SECRET + name, token)
        return {"AccessKeyId": name, "SecretAccessKey": SECRET + name, "Token": token}

    @staticmethod
    def until(seconds):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))

    def service(self, answer):
        server = self.serve(self.dir)
        server.answer = lambda method, path, headers, body: answer(method, path, headers, body) or Answer(404)
        return server

    def reads(self, key, env):
        """A store, a checkpoint and a file are read with that key."""
        self.server.forget()
        self.server.keys.pop("AKIDEXAMPLE", None)
        self.same("STORE", "ls", url="s3://bucket/STORE", env=env)
        self.same("STORE/step-1", "cat", "big", url="s3://bucket/STORE/step-1", env=env)
        self.same("m.safetensors", "cat", "w", url="s3://bucket/m.safetensors", env=env)
        self.assertEqual(self.signed_by(), {key})
        self.assertEqual({r.status for r in self.server.requests} - {200, 206, 404}, set())

    def profile(self, config="", credentials=""):
        (self.dir / "config").write_text(config)
        (self.dir / "credentials").write_text(credentials)
        return self.without_keys(AWS_CONFIG_FILE=str(self.dir / "config"),
                                 AWS_SHARED_CREDENTIALS_FILE=str(self.dir / "credentials"))

    def test_keys_of_a_profile(self):
        self.key("AKIDPROFILE", "SESSIONTOKEN")
        self.key("AKIDOTHER")
        env = self.profile(
            f"[default]\nregion = us-east-1\n\n[profile other]\nregion = us-east-1\nendpoint_url = {self.server.url}\n",
            f"# ours\n[default]\naws_access_key_id = AKIDPROFILE\naws_secret_access_key={SECRET}AKIDPROFILE\n"
            f"aws_session_token = SESSIONTOKEN\n\n[other]\naws_access_key_id=AKIDOTHER\naws_secret_access_key={SECRET}AKIDOTHER\n")
        self.reads("AKIDPROFILE", env)
        env["AWS_PROFILE"] = "other"
        del env["AWS_ENDPOINT_URL"]
        self.reads("AKIDOTHER", env)

    def test_keys_in_the_home_folder(self):
        self.key("AKIDHOME")
        home = self.dir / "home"
        (home / ".aws").mkdir(parents=True)
        (home / ".aws" / "credentials").write_text(
            f"[default]\naws_access_key_id = AKIDHOME\naws_secret_access_key = {SECRET}AKIDHOME\n")
        self.reads("AKIDHOME", self.without_keys(HOME=str(home)))

    def test_keys_of_a_program(self):
        program = self.dir / "my program"
        program.write_text(f"#!/bin/sh\necho \"$1\" >> '{self.dir}/calls'\ncat '{self.dir}/answer'\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        answer = {"Version": 1, **self.key("AKIDPROGRAM", "SESSIONTOKEN"), "Expiration": self.until(3600)}
        answer["SessionToken"] = answer.pop("Token")
        (self.dir / "answer").write_text(json.dumps(answer))
        env = self.profile(f"[default]\ncredential_process = \"{program}\" 'two words'\n")
        self.reads("AKIDPROGRAM", env)
        self.assertEqual((self.dir / "calls").read_text(), "two words\n" * 3)  # Once in each process.
        # Credentials that have expired are fetched again.
        answer["Expiration"] = self.until(-1)
        (self.dir / "answer").write_text(json.dumps(answer))
        (self.dir / "calls").unlink()
        self.reads("AKIDPROGRAM", env)
        self.assertGreater((self.dir / "calls").read_text().count("\n"), 3)

    def test_program_that_fails_is_named(self):
        env = self.profile("[default]\ncredential_process = /bin/false\n")
        result = self.run_tool("ls", "s3://bucket/STORE", expect=2, env=env)
        self.assertRegex(result.stderr, "^tensormount: PERMISSION_DENIED: .*/bin/false failed")
        self.assertEqual(self.server.requests, [])
        env = self.profile("[default]\ncredential_process = /bin/echo {}\n")
        result = self.run_tool("ls", "s3://bucket/STORE", expect=2, env=env)
        self.assertRegex(result.stderr, "^tensormount: PERMISSION_DENIED: .*credential_process gave no credentials")

    def sts(self, seconds=3600):
        key = self.key("AKIDWEB", "SESSIONTOKEN")

        def answer(method, path, headers, body):
            if method != "POST" or b"WebIdentityToken=WEBIDENTITY%2B1%3D&" not in body + b"&":
                return Answer(403, {}, b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>")
            return Answer(200, {}, (
                "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
                f"<AccessKeyId>{key['AccessKeyId']}</AccessKeyId><SecretAccessKey>{key['SecretAccessKey']}</SecretAccessKey>"
                f"<SessionToken>SESSIONTOKEN</SessionToken><Expiration>{self.until(seconds)}</Expiration>"
                "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>").encode())
        sts = self.service(answer)
        (self.dir / "token").write_text("WEBIDENTITY+1=\n")
        return sts, self.without_keys(AWS_ENDPOINT_URL_STS=sts.url, AWS_WEB_IDENTITY_TOKEN_FILE=str(self.dir / "token"),
                                      AWS_ROLE_ARN="arn:aws:iam::123456789012:role/reader")

    def test_keys_for_a_web_identity(self):
        sts, env = self.sts()
        self.reads("AKIDWEB", env)
        self.assertEqual(len(sts.requests), 3)
        self.assertIn(b"Action=AssumeRoleWithWebIdentity", sts.requests[0].body)
        self.assertIn(b"RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Freader", sts.requests[0].body)

    def test_web_identity_that_is_refused_is_named(self):
        sts, env = self.sts()
        (self.dir / "token").write_text("WEBIDENTITY-wrong")
        result = self.run_tool("ls", "s3://bucket/STORE", expect=2, env=env)
        self.assertRegex(result.stderr, "^tensormount: PERMISSION_DENIED: .*AssumeRoleWithWebIdentity.*403")
        self.assertEqual({r.status for r in sts.requests}, {403})

    def container(self, seconds=3600):
        key = {**self.key("AKIDCONTAINER", "SESSIONTOKEN"), "Expiration": self.until(seconds)}

        def answer(method, path, headers, body):
            if path == "/creds" and headers.get("Authorization") == "Bearer pod":
                return Answer(200, {}, json.dumps(key).encode())
        return self.service(answer)

    def test_keys_of_a_container(self):
        container = self.container()
        env = self.without_keys(AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{container.url}/creds")
        self.reads("AKIDCONTAINER", {**env, "AWS_CONTAINER_AUTHORIZATION_TOKEN": "Bearer pod"})
        self.assertEqual(len(container.requests), 3)
        (self.dir / "pod").write_text("Bearer pod\n")
        self.reads("AKIDCONTAINER", {**env, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(self.dir / "pod")})
        self.assertEqual({r.status for r in container.requests}, {200})

    def test_keys_that_expire_are_fetched_again(self):
        container = self.container(seconds=-1)  # Each request needs new ones.
        self.server.keys.pop("AKIDEXAMPLE")
        self.same("STORE/step-1", "ls", url="s3://bucket/STORE/step-1", env=self.without_keys(
            AWS_CONTAINER_CREDENTIALS_FULL_URI=f"{container.url}/creds", AWS_CONTAINER_AUTHORIZATION_TOKEN="Bearer pod"))
        self.assertGreater(len(container.requests), 1)
        self.assertEqual(self.signed_by(), {"AKIDCONTAINER"})

    def test_keys_of_an_instance(self):
        key = {"Code": "Success", **self.key("AKIDINSTANCE", "SESSIONTOKEN"), "Expiration": self.until(3600)}

        def answer(method, path, headers, body):
            if method == "PUT" and path == "/latest/api/token" and headers.get("x-aws-ec2-metadata-token-ttl-seconds"):
                return Answer(200, {}, b"METADATA")
            if method != "GET" or headers.get("x-aws-ec2-metadata-token") != "METADATA":
                return Answer(401)
            roles = "/latest/meta-data/iam/security-credentials/"
            return {roles: Answer(200, {}, b"reader\n"), roles + "reader": Answer(200, {}, json.dumps(key).encode())}.get(path)
        service = self.service(answer)
        self.reads("AKIDINSTANCE", self.without_keys(
            AWS_EC2_METADATA_SERVICE_ENDPOINT=service.url, AWS_EC2_METADATA_DISABLED="false"))
        self.assertEqual([r.method for r in service.requests[:3]], ["PUT", "GET", "GET"])
        self.assertEqual({r.status for r in service.requests}, {200})
        # It is off if told so.
        service.forget()
        result = self.run_tool("ls", "s3://bucket/STORE", expect=2, env=self.without_keys(
            AWS_EC2_METADATA_SERVICE_ENDPOINT=service.url))
        self.assertIn("no credentials were found", result.stderr)
        self.assertEqual(service.requests, [])

    def test_requests_are_not_signed_if_no_source_has_keys(self):
        self.server.public = True
        with ObjectServer(self.dir) as gone:
            pass
        self.same("STORE", "ls", url="s3://bucket/STORE", env=self.without_keys(
            AWS_EC2_METADATA_SERVICE_ENDPOINT=gone.url, AWS_EC2_METADATA_DISABLED="false"))
        self.assertEqual(self.signed_by(), {"none"})


class Hub(Remote):
    FIRST, SECOND = "1" * 40, "2" * 40

    def setUp(self):
        super().setUp()
        self.folder = self.dir / "www"
        for commit, weights in ((self.FIRST, "m"), (self.SECOND, "other")):
            linked(DATA / f"{weights}.safetensors", self.folder / "org" / "model" / commit / "model.safetensors")
            (self.folder / "org" / "model" / commit / "config.json").write_text("{}")
        linked(DATA / "hf", self.folder / "org" / "parts" / self.FIRST)
        linked(DATA / "STORE", self.folder / "org" / "own" / self.FIRST / "STORE")
        self.cdn = self.serve(self.folder)
        self.hub = self.serve(self.folder, hub=self.cdn)
        self.hub.revisions = {name: {"main": self.FIRST} for name in ("org/model", "org/parts", "org/own")}
        self.hub.revisions["org/model"]["refs/pr/1"] = self.SECOND
        self.hub.token = TOKEN
        self.env = {"HF_ENDPOINT": self.hub.url, "HF_TOKEN": TOKEN}
        self.addCleanup(self.check_token)

    def check_token(self):
        self.assertEqual([r for r in self.cdn.requests if "Authorization" in r.headers or TOKEN in str(r.headers)], [])

    def run_tool(self, *args, **more):
        more["env"] = self.env if more.get("env") is None else more["env"]
        result = super().run_tool(*args, **more)
        for text in (result.stdout, result.stderr):
            for secret in (TOKEN, "SIGNEDURL"):
                self.assertNotIn(secret if isinstance(text, str) else secret.encode(), text)
        return result

    def test_models_are_read(self):
        for url in ("model", "parts", "model/model.safetensors", "own/STORE/step-1", "own/STORE"):
            with self.subTest(url):
                model, _, file = url.partition("/")
                source = self.folder / "org" / model / self.FIRST / file
                self.same(source, "ls", url=f"hf://org/{url}")
                self.same(source, "cat", "big", url=f"hf://org/{url}")
                self.run_tool("diff", f"hf://org/{url}", source)
                if model != "own":
                    # The name of a model is that of its folder.
                    self.run_tool("verify", f"hf://org/{url}")
        self.assertTrue(any("/resolve-cache/" in path for path in self.paths(self.hub)))
        self.assertGreater(len(self.cdn.requests), 0)
        self.assertEqual({r.headers.get("Authorization") for r in self.hub.requests}, {f"Bearer {TOKEN}"})

    def test_reads_stay_with_one_commit(self):
        def move(number, path, range):
            if number > 1:
                self.hub.revisions["org/model"]["main"] = self.SECOND
        self.hub.fault = move
        self.same("m.safetensors", "cat", "big", url="hf://org/model")
        self.assertEqual(self.hub.revisions["org/model"]["main"], self.SECOND)
        self.assertEqual(len([path for path in self.paths(self.hub) if path.startswith("/api/models/")]), 1)
        self.assertFalse([path for path in self.paths(self.hub) + self.paths(self.cdn) if self.SECOND in path])
        self.same("other.safetensors", "cat", "big", url="hf://org/model")

    def test_log_does_not_show_the_token(self):
        self.cdn.fault = lambda number, path, range: object_server.reset(10) if number == 1 else None
        self.run_tool("cat", "hf://org/model", "w", "--log-level", "debug", "-v", text=False)
        self.assertEqual(self.cdn.faults()["reset"], 1)

    def test_revisions_are_read(self):
        self.same("m.safetensors", "cat", "w", url=f"hf://org/model@{self.FIRST}")
        self.same("other.safetensors", "cat", "w", url=f"hf://org/model@{self.SECOND}")
        self.same("other.safetensors", "cat", "w", url="hf://org/model@refs%2Fpr%2F1/model.safetensors")
        self.assertIn("NOT_FOUND", self.run_tool("ls", "hf://org/model@none", expect=2).stderr)
        self.assertIn("NOT_FOUND", self.run_tool("ls", "hf://org/none", expect=2).stderr)
        self.assertIn("NOT_FOUND", self.run_tool("ls", "hf://org/model/none.safetensors", expect=2).stderr)

    def test_url_without_a_model_is_an_invalid_argument(self):
        self.assertIn("INVALID_ARGUMENT", self.run_tool("ls", "hf://org", expect=2).stderr)

    def test_tokens_are_found(self):
        home = self.dir / "hf-home"
        home.mkdir()
        (home / "token").write_text(TOKEN + "\n")
        elsewhere = self.dir / "home" / ".cache" / "huggingface"
        elsewhere.mkdir(parents=True)
        (elsewhere / "token").write_text(TOKEN)
        for more in ({"HF_HOME": str(home)}, {"HF_TOKEN_PATH": str(home / "token")}, {"HOME": str(self.dir / "home")}):
            self.same("m.safetensors", "ls", url="hf://org/model", env={"HF_ENDPOINT": self.hub.url, **more})

    def test_refused_tokens_are_named_and_not_shown(self):
        result = self.run_tool("ls", "hf://org/model", expect=2, env={"HF_ENDPOINT": self.hub.url})
        self.assertRegex(result.stderr, "PERMISSION_DENIED: .*401.*needs a token .HF_TOKEN")
        result = self.run_tool("ls", "hf://org/model", expect=2, env={**self.env, "HF_TOKEN": "hf_WRONG"})
        self.assertRegex(result.stderr, "PERMISSION_DENIED: .*the token may not read it")
        self.assertNotIn("hf_WRONG", result.stderr)
        # Public models need none.
        self.hub.token = None
        self.same("m.safetensors", "ls", url="hf://org/model", env={"HF_ENDPOINT": self.hub.url})

    def test_object_that_changes_behind_the_hub_is_stale(self):
        seen = []

        def fault(number, path, range):
            if "/resolve/" in path and path.endswith(".safetensors"):
                seen.append(path)
                return object_server.having({"X-Linked-ETag": '"other"'}) if len(seen) > 1 else None
        self.hub.fault = fault
        self.fails("cat", "hf://org/model", "big", code="STALE", says="was replaced")
        self.assertGreater(self.hub.faults()["having"], 0)

    def test_wrong_size_is_refused(self):
        self.hub.fault = lambda number, path, range: (
            object_server.having({"X-Linked-Size": "12345"}) if path.endswith("model.safetensors") else None)
        self.fails("ls", "hf://org/model", code="DATA_LOSS", says="12345 bytes")

    def test_failures_of_the_cdn_do_not_show_its_signed_urls(self):
        self.cdn.fault = lambda number, path, range: object_server.status(403)
        self.assertIn("403", self.run_tool("ls", "hf://org/model", expect=2).stderr)
        self.cdn.fault = lambda number, path, range: object_server.status(503, {"Retry-After": "100"})
        self.assertIn("503", self.run_tool("ls", "hf://org/model", expect=2).stderr)
        self.cdn.fault = lambda number, path, range: object_server.wrong_range()
        self.assertIn("asked for the bytes", self.run_tool("ls", "hf://org/model", expect=2).stderr)
        self.assertEqual(sum(self.cdn.faults().values()), len(self.cdn.requests))

    def test_broken_answers_of_the_cdn_do_not_change_bytes(self):
        self.cdn.fault = lambda number, path, range: object_server.reset(300_000) if number % 2 else None
        self.same("m.safetensors", "cat", "big", url="hf://org/model")
        self.assertGreater(self.cdn.faults()["reset"], 0)


if __name__ == "__main__":
    harness.main()
