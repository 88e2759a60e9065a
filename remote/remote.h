// SPDX-License-Identifier: Apache-2.0
#ifndef TENSORMOUNT_REMOTE_REMOTE_H_
#define TENSORMOUNT_REMOTE_REMOTE_H_

namespace tensormount {

// Makes FileSystemFor know http://, https://, s3:// and gs://, and hf://. Programs and the library
// call it when they start. Nothing is opened before a path needs it. May be called again.
void AddRemoteFileSystems();

}  // namespace tensormount

#endif  // TENSORMOUNT_REMOTE_REMOTE_H_
