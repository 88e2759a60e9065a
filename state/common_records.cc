// SPDX-License-Identifier: Apache-2.0
#include "state/common_records.h"

#include "index/records/layer_names.h"
#include "index/records/record_coding.h"

namespace tensormount {

CommonValues SharedCommonRecords(const StateDict& state) {
  CommonValues records = state.common();
  if (const CommonDict* content = state.content_metadata()) {
    records.emplace(kContentMetadataRecord, *content);
  }
  for (const auto& [key, pattern] : state.layer_names()) {
    records.emplace(std::string(kLayersRecordPrefix) + key, pattern);
  }
  return records;
}

Result<std::optional<std::pair<std::string, CommonValue>>> RankCommonRecord(const StateDict& state,
                                                                            int rank) {
  using Record = std::optional<std::pair<std::string, CommonValue>>;
  if (state.rank_common().empty()) return Record();
  CommonValue dict = DictOf(state.rank_common());
  if (Status status = CheckCommon(dict); !status.ok()) {
    return status.WithContext("the common values of this rank alone");
  }
  return Record(std::in_place, RankRecordName(rank), std::move(dict));
}

}  // namespace tensormount
