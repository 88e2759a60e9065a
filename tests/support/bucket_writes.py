# SPDX-License-Identifier: Apache-2.0
"""Writes of the stand-in for S3 (object_server.py): objects, conditions, uploads in parts, copies, deletions.

An object is a file that appears by one rename, so that a reader has the old object or the new one. What real servers
check is checked: conditions, SHA-256 of parts, sizes and order of parts.
"""

import base64
import hashlib
import os
import re
import tempfile
import threading
import time
import uuid
from urllib.parse import unquote
from xml.sax.saxutils import escape

MIB = 1 << 20


class Writes:
    """`server`: the ObjectServer. All calls are made by the threads of connections."""

    def __init__(self, server):
        self.server = server
        self.conditional = True  # Whether it knows If-None-Match and If-Match of puts; "refused": it answers 501.
        self.ignores = set()  # Conditions that it does not know, such as "If-Match".
        self.conditional_parts = True  # The same for the end of an upload in parts.
        self.checksums = True  # Whether it keeps and tells the SHA-256 of parts.
        self.lists_uploads = True
        self.copies = True
        self.older = 0  # Seconds that objects and uploads seem to be younger than they are (negative: older).
        self.least_part = 5 * MIB
        self.meta = {}  # path -> headers that are kept with the object.
        self.uploads = {}  # id -> Upload
        self.lock = threading.Lock()

    def handle(self, method, path, query, headers, body):
        """The answer to a write, or to a question about uploads; None: it is neither."""
        from object_server import Answer
        given = {name: unquote(value) for name, _, value in (pair.partition("=") for pair in query.split("&") if pair)}
        bucket, _, key = path.lstrip("/").partition("/")
        if not (self.server.folder / bucket).is_dir():
            return self._error(404, "NoSuchBucket")
        with self.lock:
            if method == "GET" and "uploads" in given:
                return self._list_uploads(bucket, given)
            if method == "GET" and "uploadId" in given:
                return self._list_parts(path, given)
            if method == "PUT" and "uploadId" in given:
                return self._part(path, given, headers, body)
            if method == "POST" and "uploads" in given:
                return self._begin(path, headers)
            if method == "POST" and "uploadId" in given:
                return self._complete(path, given, headers, body)
            if method == "DELETE" and "uploadId" in given:
                found = self.uploads.pop(given["uploadId"], None)
                return Answer(204) if found else self._error(404, "NoSuchUpload")
            if method == "DELETE":
                file = self.server.folder / path.lstrip("/")
                if file.is_file() and (refused := self._refused(path, headers)):
                    return refused
                if file.is_file():
                    file.unlink()
                self.meta.pop(path, None)
                return Answer(204)
            if method == "PUT" and key:
                return self._put(path, headers, body)
        return None

    def headers_of(self, path):
        with self.lock:
            return dict(self.meta.get(path, {}))

    def _error(self, code, name, of=""):
        return self.server._error(code, name, f"stand-in: {name} {of}")

    def _refused(self, path, headers, known=True):
        """The answer if a condition of a put does not hold."""
        from object_server import etag_of
        file = self.server.folder / path.lstrip("/")
        conditions = [name for name in ("If-None-Match", "If-Match") if name in headers]
        if conditions and self.conditional == "refused":
            return self._error(501, "NotImplemented")
        if not conditions or not self.conditional or not known or conditions[0] in self.ignores:
            return None
        if headers.get("If-None-Match") == "*" and file.is_file():
            return self._error(412, "PreconditionFailed", "If-None-Match")
        if "If-Match" in headers:
            if not file.is_file():
                return self._error(404, "NoSuchKey")
            if headers["If-Match"] != etag_of(file.stat()):
                return self._error(412, "PreconditionFailed")
        return None

    def _store(self, path, headers, chunks):
        """Makes the object. Returns its ETag."""
        from object_server import etag_of
        file = self.server.folder / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.server.folder.parent, delete=False) as new:
            for chunk in chunks:
                new.write(chunk)
        os.replace(new.name, file)
        self.meta[path] = {name: value for name, value in headers.items() if name.lower().startswith("x-amz-meta-")}
        return etag_of(file.stat())

    def _put(self, path, headers, body):
        from object_server import Answer
        if refused := self._refused(path, headers):
            return refused
        if source := headers.get("x-amz-copy-source"):
            return self._copy(path, headers, unquote(source))
        return Answer(200, {"ETag": self._store(path, headers, [body])})

    def _copy(self, path, headers, source):
        from object_server import Answer, etag_of
        file = self.server.folder / source.lstrip("/")
        if not self.copies:
            return self._error(501, "NotImplemented")
        if not file.is_file():
            return self._error(404, "NoSuchKey")
        wanted = headers.get("x-amz-copy-source-if-match")
        if wanted and wanted != etag_of(file.stat()):
            return self._error(412, "PreconditionFailed")
        etag = self._store(path, self.meta.get(source, {}), [file.read_bytes()])
        return Answer(200, {}, f"<CopyObjectResult><ETag>{escape(etag)}</ETag></CopyObjectResult>".encode())

    def _begin(self, path, headers):
        from object_server import Answer
        number = uuid.uuid4().hex + "+/="  # An id that needs encoding.
        self.uploads[number] = {"path": path, "headers": dict(headers), "parts": {}, "begun": time.time()}
        return Answer(200, {}, f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId>"
                               "</InitiateMultipartUploadResult>".encode())

    def _part(self, path, given, headers, body):
        from object_server import Answer
        upload = self.uploads.get(given["uploadId"])
        if not upload or upload["path"] != path:
            return self._error(404, "NoSuchUpload")
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        if headers.get("x-amz-checksum-sha256", digest) != digest:
            return self._error(400, "BadDigest")
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        upload["parts"][int(given["partNumber"])] = (etag, digest, body)
        return Answer(200, {"ETag": etag})

    def _complete(self, path, given, headers, body):
        from object_server import Answer
        upload = self.uploads.get(given["uploadId"])
        if not upload or upload["path"] != path:
            return self._error(404, "NoSuchUpload")
        if "If-None-Match" in headers and self.conditional_parts == "refused":
            return self._error(501, "NotImplemented")
        if refused := self._refused(path, headers, known=self.conditional_parts):
            return refused
        wanted = [(int(number), etag, checksum) for number, etag, checksum in re.findall(
            r"<Part><PartNumber>(\d+)</PartNumber><ETag>(.*?)</ETag>(?:<ChecksumSHA256>(.*?)</ChecksumSHA256>)?</Part>",
            body.decode())]
        chunks = []
        for at, (number, etag, checksum) in enumerate(wanted):
            part = upload["parts"].get(number)
            if not part or part[0] != etag or number != at + 1 or (checksum and checksum != part[1]):
                return self._error(400, "InvalidPart")
            if self.checksums and "x-amz-checksum-algorithm" in upload["headers"] and not checksum:
                return self._error(400, "InvalidRequest")
            if len(part[2]) < self.least_part and at + 1 < len(wanted):
                return self._error(400, "EntityTooSmall")
            chunks.append(part[2])
        if not chunks:
            return self._error(400, "MalformedXML")
        etag = self._store(path, upload["headers"], chunks)
        del self.uploads[given["uploadId"]]
        return Answer(200, {}, f"<CompleteMultipartUploadResult><ETag>{escape(etag, {chr(34): '&#34;'})}</ETag>"
                               "</CompleteMultipartUploadResult>".encode())

    def _list_parts(self, path, given):
        from object_server import Answer
        upload = self.uploads.get(given["uploadId"])
        if not upload or upload["path"] != path:
            return self._error(404, "NoSuchUpload")
        after = int(given.get("part-number-marker", "0"))
        numbers = sorted(number for number in upload["parts"] if number > after)
        page = numbers[:self.server.page]
        xml = "<ListPartsResult>"
        for number in page:
            etag, digest, data = upload["parts"][number]
            xml += f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag, {chr(34): '&quot;'})}</ETag>"
            xml += f"<Size>{len(data)}</Size>"
            xml += f"<ChecksumSHA256>{digest}</ChecksumSHA256></Part>" if self.checksums else "</Part>"
        more = len(page) < len(numbers)
        xml += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        xml += f"<NextPartNumberMarker>{page[-1] if page else 0}</NextPartNumberMarker></ListPartsResult>"
        return Answer(200, {}, xml.encode())

    def _list_uploads(self, bucket, given):
        from object_server import Answer
        if not self.lists_uploads:
            return self._error(501, "NotImplemented")
        found = sorted((upload["path"][len(bucket) + 2:], number, upload["begun"])
                       for number, upload in self.uploads.items() if upload["path"].startswith(f"/{bucket}/"))
        found = [one for one in found if one[0].startswith(given.get("prefix", ""))
                 and one[:2] > (given.get("key-marker", ""), given.get("upload-id-marker", ""))]
        page = found[:self.server.page]
        xml = "<ListMultipartUploadsResult><EncodingType>url</EncodingType>"
        for key, number, begun in page:
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(begun + self.older))
            xml += f"<Upload><Key>{key}</Key><UploadId>{number}</UploadId><Initiated>{when}</Initiated></Upload>"
        more = len(page) < len(found)
        xml += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            xml += f"<NextKeyMarker>{page[-1][0]}</NextKeyMarker><NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>"
        return Answer(200, {}, (xml + "</ListMultipartUploadsResult>").encode())
