// Runs the kernel above on what stdin holds and writes its outputs to stdout. Arguments: grid, late, row stride, input
// alignment, bytes of a row, bytes of an answer, bytes of a second answer, bytes of packed weights, most rows of a
// batch, whether to use a table, rows of each batch. stdin: packed weights, then the rows of each batch.
static std::function<void()> body;
#if PACKETS
#define PASSED , 0xFEDCBA98u
#else
#define PASSED
#endif
#if GATHER
#define LIST , list, cells
#else
#define LIST
#endif
#if SIFT
#define NEXT , next_list, next_cells, threshold
#else
#define NEXT
#endif
#if CARRIED
alignas(16) static CarriedRows carried;
#define WITH_ROWS , carried
#define AT_ROWS nullptr
#else
#define WITH_ROWS
#define AT_ROWS (u8*)entries[0]
#endif

static void enter() { body(); fibers[number_of_thread()].done = true; }

static std::vector<u8> read_bytes(size_t size) {
  std::vector<u8> bytes(size);
  if (fread(bytes.data(), 1, size, stdin) != size) exit(5);
  return bytes;
}

static void run_cluster() {
  memset(memories, 0xFF, sizeof memories);  // NaN for those who take it for floats
  barriers.clear();
  copies.clear();
  arrived = phase_of_cluster = 0;
  warps.assign(TOGETHER * WARPS, {0, 32, 0, ""});
  for (Meeting& block : blocks) block = {0, THREADS, 0, ""};
  withhold(OVERLAP);
  fibers.resize(TOGETHER * THREADS);
  for (Fiber& f : fibers) {
    f.done = false;
    f.stack.resize(1 << 17);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = &scheduler;
    makecontext(&f.context, enter, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (u32 i = 0; i < fibers.size(); i++) {
      if (fibers[i].done) continue;
      left = true;
      be(i);
      swapcontext(&scheduler, &fibers[i].context);
    }
  }
}

int main(int count, char** values) {
  auto number = [&](int i) { return atoll(values[i + 1]); };
  gridDim.x = number(0);
  blockDim.x = THREADS;
  late = number(1);
  const i64 stride = number(2), align = number(3), width = number(4), answer_1 = number(5), answer_2 = number(6);
  const i64 packed_bytes = number(7), most = number(8), batches = count - 11 - (SIFT || GATHER ? 2 : 0);
  const bool table = number(9);
  const u8* packed = guarded(read_bytes(packed_bytes).data(), packed_bytes, 16);
  std::vector<i64> entries;
  for (int b = 0; b < batches; b++) {
    const i64 rows = number(10 + b), size = rows ? (rows - 1) * stride + width : 0;
    entries.push_back((i64)guarded(read_bytes(size).data(), size, align));
    entries.push_back((i64)guarded(nullptr, rows * answer_1, 16));
    entries.push_back((i64)guarded(nullptr, rows * answer_2, 16));
    entries.push_back(rows);
    for (int i = 0; i < 3; i++) {
      const i64 page = sysconf(_SC_PAGESIZE), at = entries[4 * b + i], bytes = i == 0 ? size : rows * (i == 1 ? answer_1 : answer_2);
      if (bytes) withheld.push_back({(u8*)(at / page * page), (size_t)((at % page + bytes + page - 1) / page * page)});
    }
  }
#if SIFT || GATHER  // two arguments more: the threshold, and how many rows are listed; stdin: their numbers
  const float threshold = atof(values[count - 2]);
  const u32 listed = number(count - 2);
  alignas(16) u32 cells[8] = {listed}, next_cells[8] = {};
  const u32* list = (const u32*)guarded(read_bytes(4 * listed).data(), 4 * listed, 4);
  u32* next_list = (u32*)guarded(nullptr, 4 * most, 4);
#endif
  body = [&] {
    if (table) gigamlp_fused(nullptr, stride, packed, nullptr, nullptr, most, entries.data(), batches PASSED WITH_ROWS LIST NEXT);
    else gigamlp_fused(AT_ROWS, stride, packed, (void*)entries[1], (void*)entries[2], most, nullptr, 1 PASSED WITH_ROWS LIST NEXT);
  };
#if CARRIED
  withhold(false);
  if (table || entries[3] * width > CARRIED) exit(7);
  memcpy(carried.bytes, (u8*)entries[0], entries[3] * width);
#endif
  if (gridDim.x % TOGETHER) exit(6);
  for (u32 first = 0; first < gridDim.x; first += TOGETHER) {
    blockIdx.x = first;
    run_cluster();
  }
  withhold(false);
  for (int b = 0; b < batches; b++) {
    fwrite((void*)entries[4 * b + 1], answer_1, entries[4 * b + 3], stdout);
    fwrite((void*)entries[4 * b + 2], answer_2, entries[4 * b + 3], stdout);
  }
#if SIFT || GATHER
  fwrite(cells, 4, 8, stdout);
  fwrite(next_cells, 4, 8, stdout);
  fwrite(next_list, 4, next_cells[0], stdout);
#endif
  return 0;
}
