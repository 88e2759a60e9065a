# SPDX-License-Identifier: Apache-2.0
"""Every command that reads, over a real nginx as people set it up: TLS, limits, compression, proxies, redirects."""

import collections
import http.client
import os
import random
import shutil
import subprocess
import time
import urllib.request

from servers import Nginx, PlainServer, certificates

import harness
import object_server
import remote_test
from remote_sources import DATA, LIBRARY, Remote, WEIGHT, linked, setUpModule  # noqa: F401


class OverNginx(Remote):
    CONFIG = {}

    def nginx(self, root=DATA, **config):
        server = Nginx(self.dir / f"nginx-{len(list(self.dir.iterdir()))}", root, **config)
        server.__enter__()
        self.addCleanup(server.__exit__)
        return server

    def run_tool(self, *args, timeout=120, **more):  # Limits of servers make commands wait.
        return super().run_tool(*args, timeout=timeout, **more)

    def reads_all(self, url, env=None):
        """Reads every source by several commands, and compares it with the files."""
        for source in self.SOURCES:
            self.same(source, "ls", "-l", url=f"{url}/{source}", env=env)
        self.same("STORE/step-1", "verify", url=f"{url}/STORE/step-1", env=env)
        self.same("m.safetensors", "verify", url=f"{url}/m.safetensors", env=env)
        self.run_tool("export", f"{url}/BIG/step-1", self.dir / "big", "--to", "safetensors", "--if-exists", "replace",
                      env=env)
        with open(self.dir / "big", "rb") as mine, open(DATA / "big.exported", "rb") as expected:
            self.assertEqual(mine.read(), expected.read())
        self.assertEqual(self.run_tool("cat", f"{url}/big.safetensors", "w", text=False, env=env).stdout,
                         (DATA / "big.w").read_bytes())

    @classmethod
    def setUpClass(cls):
        if not (DATA / "big.w").exists():
            subprocess.run([harness.TOOL, "export", DATA / "BIG/step-1", DATA / "big.exported", "--to", "safetensors"],
                           check=True, capture_output=True, timeout=60)
            with open(DATA / "big.w", "wb") as file:
                subprocess.run([harness.TOOL, "cat", DATA / "big.safetensors", "w"], check=True, stdout=file, timeout=60)


def inherit(case, names):
    """Leaves a class only these tests of its bases."""
    for name in dir(case):
        if name.startswith("test_") and name not in names and name not in vars(case):
            setattr(case, name, None)
    missing = [name for name in names if getattr(case, name, None) is None]
    assert not missing, missing
    return case


# Tests of the stand-in server that ask nothing of it but its files.
COMMANDS = [
    "test_ls_prints_the_same", "test_info_of_foreign_checkpoints_prints_the_same",
    "test_info_of_own_checkpoint_prints_the_same", "test_info_of_a_key_prints_the_same", "test_cat_prints_the_same",
    "test_verify_of_foreign_checkpoints_prints_the_same", "test_verify_of_own_checkpoint_prints_the_same",
    "test_export_writes_the_same", "test_diff_and_load_compare_with_local_files", "test_stores_are_not_listed",
]


class Commands(OverNginx, remote_test.Http):
    """Every command of docs/remote.md that reads."""

    LISTEN = ""

    def setUp(self):
        super().setUp()
        server = ""
        if self.LISTEN:
            authority, (certificate, key) = certificates(self.dir / "tls")
            server = f"ssl_certificate {certificate}; ssl_certificate_key {key};"
            os.environ["AWS_CA_BUNDLE"] = str(authority)
            self.addCleanup(os.environ.pop, "AWS_CA_BUNDLE")
        self.real = self.nginx(listen=self.LISTEN, server=server)
        self.url = self.real.url

    def tearDown(self):
        self.assertEqual(self.server.requests, [])  # The stand-in was not asked.
        self.assertLessEqual(set(self.real.statuses()), {206, 404, 416})
        self.assertIn(206, self.real.statuses())

    def test_opening_costs_few_requests(self):
        for source in ("STORE/step-1", "MANY/step-1", "m.safetensors", "many.safetensors"):
            before = len(self.real.requests())
            self.same(source, "ls")
            self.wait_for("the log", lambda: len(self.real.requests()) > before)
            self.assertLessEqual(len(self.real.requests()) - before, 4)

    def test_copy_writes_the_same(self):
        self.run_tool("copy", f"{self.url}/STORE/step-1", self.dir / "here")
        self.run_tool("verify", self.dir / "here" / "step-1")
        self.run_tool("diff", self.dir / "here" / "step-1", DATA / "STORE" / "step-1")

    def test_doctor_names_what_the_server_offers(self):
        out = self.run_tool("doctor", f"{self.url}/m.safetensors", expect=None).stdout
        self.assertRegex(out, "byte ranges.*work")
        self.assertRegex(out, "ETag")

    def test_names_with_special_characters(self):
        linked(DATA / "m.safetensors", DATA / "odd é+%41 name" / "m 1.safetensors")
        self.addCleanup(shutil.rmtree, DATA / "odd é+%41 name")
        self.same("m.safetensors", "cat", "w", url=f"{self.url}/odd%20%C3%A9+%2541%20name/m%201.safetensors")

    def test_python_reads_the_same(self):
        script = ("import sys, tensormount as tm\nwith tm.open(sys.argv[1]) as a, tm.open(sys.argv[2]) as b:\n"
                  "    assert sorted(a) == sorted(b) and len(a) > 3\n"
                  "    for key in a:\n"
                  "        if 'fp' not in key: assert a[key][...].tobytes() == b[key][...].tobytes(), key\n")
        env = {**os.environ, "PYTHONPATH": str(remote_test.ROOT / "python"), "TENSORMOUNT_LIBRARY": str(LIBRARY)}
        for source in ("STORE/step-1", "m.safetensors"):
            subprocess.run([remote_test.sys.executable, "-B", "-c", script, f"{self.url}/{source}", str(DATA / source)],
                           env=env, check=True, timeout=60)


inherit(Commands, COMMANDS)


class CommandsOverTls(Commands):
    LISTEN = "ssl http2"


class Configurations(OverNginx):
    """The same bytes, however nginx is set up."""

    def test_compression_does_not_touch_objects(self):
        gzip = "gzip on; gzip_types *; gzip_min_length 1; gzip_http_version 1.0; gzip_proxied any;"
        server = self.nginx(http=gzip)
        request = urllib.request.Request(f"{server.url}/hf/config.json", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request) as answer:
            self.assertEqual(answer.headers["Content-Encoding"], "gzip")
        self.reads_all(server.url)

    def test_encoded_files_are_refused(self):
        root = self.dir / "www"
        linked(DATA / "m.safetensors", root / "m.safetensors.gz")
        server = self.nginx(root, location="gzip_static always;")
        result = self.fails("ls", f"{server.url}/m.safetensors", code="UNSUPPORTED", says="encoded (gzip)")
        self.assertIn("m.safetensors", result.stderr)

    def test_connections_that_nginx_closes(self):
        for keep in ("keepalive_requests 1;", "keepalive_requests 3;", "keepalive_timeout 0;", "keepalive_timeout 3ms;"):
            with self.subTest(keep):
                server = self.nginx(server=keep)
                self.reads_all(server.url)
                most = max(request[3] for request in server.requests())
                self.assertLessEqual(most, {"keepalive_requests 1;": 1, "keepalive_requests 3;": 3,
                                            "keepalive_timeout 0;": 1}.get(keep, 1000))

    def test_request_limits_are_waited_for(self):
        for more in ("", "limit_req_status 429; add_header Retry-After 1 always;"):
            with self.subTest(more):
                server = self.nginx(http="limit_req_zone $server_port zone=r:1m rate=20r/s;",
                                    server="limit_req zone=r burst=4 nodelay;" + more)
                begun = time.monotonic()
                self.reads_all(server.url)
                print(f"20 requests a second {more}: {time.monotonic() - begun:.1f} s, "
                      f"{dict(collections.Counter(server.statuses()))}")
                self.assertIn(429 if more else 503, server.statuses())

    def test_connection_limits_are_waited_for(self):
        for most in (1, 2, 6):
            with self.subTest(most):
                # The bytes of an answer take a while, so that connections exist at the same time.
                server = self.nginx(http="limit_conn_zone $server_port zone=c:1m;",
                                    server=f"limit_conn c {most}; limit_rate 40m;")
                self.reads_all(server.url)
                print(f"limit_conn {most}: {dict(collections.Counter(server.statuses()))}")
                if most == 1:
                    self.assertIn(503, server.statuses())

    def test_small_buffers(self):
        server = self.nginx(http="output_buffers 1 512; postpone_output 0; tcp_nodelay on; limit_rate_after 1k;",
                            location="sendfile off; tcp_nopush off;")
        self.reads_all(server.url)

    def test_without_etag(self):
        server = self.nginx(server="etag off;")
        result = self.run_tool("ls", f"{server.url}/m.safetensors")
        self.assertEqual(result.stderr.count("sends no ETag"), 1, result.stderr)
        self.assertEqual(self.run_tool("cat", f"{server.url}/big.safetensors", "w", text=False).stdout,
                         (DATA / "big.w").read_bytes())

    def test_without_ranges_is_refused_after_one_request(self):
        server = self.nginx(server="max_ranges 0;")
        self.fails("ls", f"{server.url}/big.safetensors", code="UNSUPPORTED", says="ignores the Range header")
        self.assertEqual(len(server.requests()), 1)

    def test_directories_that_nginx_redirects_and_lists(self):
        """/DIR becomes /DIR/, which is a page of HTML with `autoindex on` and 403 without."""
        root = self.dir / "www"
        for name in ("v1.0", "model", "model.d"):
            linked(DATA / "hf", root / name)
            linked(DATA / "STORE", root / f"{name}-store" / "STORE")
            linked(DATA / "STORE" / "step-1", root / f"{name}.own")
        for location in ("", "autoindex on;"):
            server = self.nginx(root, location=location)
            for name in ("v1.0", "model", "model.d"):
                for slash in ("", "/"):
                    with self.subTest(name=name, location=location, slash=slash):
                        local = self.run_tool("ls", DATA / "hf").stdout
                        self.assertEqual(self.run_tool("ls", f"{server.url}/{name}{slash}").stdout, local)
                        self.run_tool("verify", f"{server.url}/{name}.own{slash}")
                        self.fails("ls", f"{server.url}/{name}-store/STORE{slash}", code="UNSUPPORTED",
                                   says="list no directories")

    def test_redirect_to_https(self):
        authority, (certificate, key) = certificates(self.dir / "tls")
        secure = self.nginx(listen="ssl", server=f"ssl_certificate {certificate}; ssl_certificate_key {key};")
        plain = self.nginx(location=f"return 301 {secure.url}$request_uri;")
        self.reads_all(plain.url, env={"SSL_CERT_FILE": str(authority)})
        self.assertEqual(set(plain.statuses()), {301})
        self.fails("ls", f"{plain.url}/m.safetensors", code="PERMISSION_DENIED", says="certificate")


class Refusals(OverNginx):
    def test_certificates(self):
        authority, pair = certificates(self.dir / "tls")
        other, _ = certificates(self.dir / "other")
        _, wrong_name = certificates(self.dir / "tls-name", name="DNS:elsewhere.example")
        bundle = self.dir / "bundle.pem"
        bundle.write_bytes(other.read_bytes() + authority.read_bytes() + (self.dir / "tls-name/ca.pem").read_bytes())

        def serve(pair):
            return self.nginx(listen="ssl", server=f"ssl_certificate {pair[0]}; ssl_certificate_key {pair[1]};")
        server, misnamed = serve(pair), serve(wrong_name)
        for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"):
            for file in (authority, bundle):
                self.same("m.safetensors", "ls", url=f"{server.url}/m.safetensors", env={name: str(file)})
            for url, file in ((server.url, other), (misnamed.url, bundle)):
                result = self.run_tool("ls", f"{url}/m.safetensors", expect=2, env={name: str(file)})
                self.assertRegex(result.stderr, "^tensormount: PERMISSION_DENIED: .*(certificate|SSL)", name)
            result = self.run_tool("ls", f"{server.url}/m.safetensors", expect=2, env={name: "/no/such/file"})
            self.assertRegex(result.stderr, "^tensormount: PERMISSION_DENIED: .*/no/such/file", name)
        # http spoken to a port of https: nginx answers 400.
        result = self.run_tool("ls", f"{server.url.replace('https', 'http')}/m.safetensors", expect=2)
        self.assertRegex(result.stderr, "^tensormount: UNSUPPORTED: .*400 Bad Request")
        # And the other way round.
        plain = self.nginx()
        result = self.run_tool("ls", f"{plain.url.replace('http', 'https')}/m.safetensors", expect=2,
                               env={"TENSORMOUNT_PATIENCE": "2"})
        self.assertRegex(result.stderr, "^tensormount: (UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED): .*(SSL|TLS)")

    def test_passwords_and_permissions(self):
        password = subprocess.run(["openssl", "passwd", "-apr1", "PASSWORD"], check=True, capture_output=True, text=True)
        (self.dir / "users").write_text(f"me:{password.stdout}")
        root = self.dir / "www"
        for name in ("secret", "denied", "unreadable", "open"):
            linked(DATA / "STORE", root / name)
            linked(DATA / "m.safetensors", root / f"{name}.safetensors")
        server = self.nginx(root, server=f"""
            location /secret {{ auth_basic "weights"; auth_basic_user_file {self.dir}/users; }}
            location /denied {{ deny all; }}
            location /unreadable {{ return 403; }}
            location /gone {{ return 410; }}
            location /legal {{ return 451; }}""")
        for path, says in (("secret", "401 Unauthorized"), ("denied", "403 Forbidden"), ("unreadable", "403 Forbidden")):
            for command in (["ls"], ["info"], ["verify"], ["cat", "w"]):
                for source in (f"{path}.safetensors", f"{path}/step-1"):
                    self.fails(command[0], f"{server.url}/{source}", *command[1:], code="PERMISSION_DENIED", says=says)
        for source in ("none.safetensors", "none/step-1", "open/step-9", "open/step-1/none", "gone.safetensors"):
            self.fails("ls", f"{server.url}/{source}", code="NOT_FOUND", says=f"{server.url}/{source}")
        self.fails("ls", f"{server.url}/legal.safetensors", code="UNSUPPORTED", says="451")
        self.fails("ls", f"{server.url.replace('//', '//me:PASSWORD@')}/secret.safetensors", code="INVALID_ARGUMENT",
                   says="password")
        self.same("m.safetensors", "ls", url=f"{server.url}/open.safetensors")

    def test_server_of_python_is_refused_after_one_request(self):
        linked(DATA / "big.safetensors", self.dir / "www" / "big.safetensors")
        linked(DATA / "STORE", self.dir / "www" / "STORE")
        linked(DATA / "MANY", self.dir / "www" / "MANY")
        with PlainServer(self.dir / "www") as server:
            for command in (["ls"], ["info"], ["verify"], ["cat", "w"]):
                before = len(server.requests())
                self.fails(command[0], f"{server.url}/big.safetensors", *command[1:], code="UNSUPPORTED",
                           says=f"{server.url}/big.safetensors: the server ignores the Range header")
                self.assertEqual(server.requests()[before:], [("GET", "/big.safetensors")])
            # A small object comes whole; the index does not.
            result = self.run_tool("cat", f"{server.url}/MANY/step-1", "layers.7.weight", expect=2)
            self.assertRegex(result.stderr,
                             "(?m)^tensormount: UNSUPPORTED: .*index.sst: the server ignores the Range header")
            self.assertIn("ignores the Range header",
                          self.run_tool("doctor", f"{server.url}/big.safetensors", expect=None).stdout)


class Proxies(OverNginx):
    """nginx in front of a server that breaks (the stand-in)."""

    def test_broken_upstream_does_not_change_bytes(self):
        rng = random.Random(5)
        s = object_server
        faults = [s.status(503), s.status(500), s.reset(0), s.reset(100_000), s.short(), s.short(1 << 20), s.delay(1.5)]
        for buffering in ("on", "off"):
            with self.subTest(buffering):
                upstream = self.serve(DATA)
                proxy = self.nginx(location=f"proxy_pass {upstream.url}; proxy_http_version 1.1; proxy_read_timeout 1s;"
                                            f"proxy_buffering {buffering}; proxy_next_upstream off;")
                upstream.fault = lambda number, path, range: rng.choice(faults) if rng.random() < 0.1 else None
                self.reads_all(proxy.url)
                seen = upstream.faults()
                print(f"proxy_buffering {buffering}: {len(upstream.requests)} requests, {dict(seen)}, "
                      f"answers {dict(collections.Counter(proxy.statuses()))}")
                self.assertGreater(sum(seen.values()), 3)

    def test_upstream_that_is_not_there_is_named(self):
        with self.serve(self.dir) as gone:
            pass
        proxy = self.nginx(location=f"proxy_pass {gone.url};")
        result = self.run_tool("ls", f"{proxy.url}/m.safetensors", expect=2, env={"TENSORMOUNT_PATIENCE": "2"})
        self.assertRegex(result.stderr, "^tensormount: (UNAVAILABLE|DEADLINE_EXCEEDED): .*502 Bad Gateway")

    def test_cache_of_slices(self):
        """A proxy that keeps slices of objects, as content delivery networks do. What it keeps may be old; when the
        origin replaces an object, a read gives the bytes of one object, or an error."""
        root = self.dir / "www"
        root.mkdir()
        origin = self.nginx(root)
        cache = (f"proxy_cache_path {self.dir}/cache keys_zone=c:1m use_temp_path=off;")
        proxy = self.nginx(http=cache, location=f"""
            slice 1m; proxy_cache c; proxy_cache_key $uri$slice_range; proxy_set_header Range $slice_range;
            proxy_http_version 1.1; proxy_cache_valid 200 206 1m; proxy_pass {origin.url};""")
        bytes_of = {}
        for version in (1, 2):
            bytes_of[version] = bytes([version]) * WEIGHT
            harness.write_safetensors(self.dir / f"v{version}", {"w": ("U8", (WEIGHT,), bytes_of[version])})
            os.utime(self.dir / f"v{version}", (version * 1000, version * 1000))
        outcomes = collections.Counter()
        for turn in range(12):
            name = f"{turn}.safetensors"  # Nothing of it is in the cache.
            shutil.copy2(self.dir / "v1", root / name)
            with open(self.dir / "out", "wb") as file:  # A pipe that is not read would hold the command up.
                reader = subprocess.Popen([harness.TOOL, "cat", f"{proxy.url}/{name}", "w"], stdout=file,
                                          stderr=subprocess.PIPE, env={**os.environ, "TENSORMOUNT_PATIENCE": "3"})
            time.sleep(0.03 * turn)
            shutil.copy2(self.dir / "v2", root / "new")
            os.replace(root / "new", root / name)
            _, err = reader.communicate(timeout=60)
            out = (self.dir / "out").read_bytes()
            whole = [version for version in (1, 2) if bytes_of[version].startswith(out)]
            self.assertTrue(whole, f"mixed bytes: {out.count(1)} old and {out.count(2)} new ones")
            if reader.returncode == 0:
                self.assertEqual(len(out), WEIGHT)
                outcomes["whole"] += 1
            else:
                self.assertRegex(err, b"^tensormount: (STALE|UNAVAILABLE|DEADLINE_EXCEEDED|DATA_LOSS): ")
                outcomes[err.split(b":")[1].strip().decode()] += 1
        print(f"cache of slices, replaced at its origin: {dict(outcomes)}")
        self.assertGreater(outcomes["whole"], 0)
        self.assertGreater(12 - outcomes["whole"], 0)


if __name__ == "__main__":
    harness.main()
