// A device for tests, "sim": its kernels run on queues, one thread each, long after the host has sent them.
//
// The host gets the shape of a result at once and the numbers later, as from a GPU. A kernel is what the CPU does,
// on memory that both have. Whatever makes the host wait is counted. Nothing is ordered unless events order it.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

extern "C" {
int Py_IsInitialized();
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);
}

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// -- what tests look at --------------------------------------------------------------------------

struct Ran {
  int64_t queue;
  std::string name;
  double begun, ended;
};

std::mutex log_lock;
std::vector<Ran>& timeline() {
  static auto* ran = new std::vector<Ran>();
  return *ran;
}
std::string& first_error() {
  static auto* text = new std::string();
  return *text;
}
std::string& last_sync() {
  static auto* text = new std::string();
  return *text;
}
std::atomic<int64_t> host_syncs{0};
std::atomic<int64_t> kernel_us{0};

void check_device() {
  std::lock_guard<std::mutex> held(log_lock);
  TORCH_CHECK(first_error().empty(), "a kernel of the sim device failed: ", first_error());
}

// The host waits for the device, which is counted. It does not hold the interpreter lock meanwhile.
struct HostWaits {
  explicit HostWaits(const char* why) {
    ++host_syncs;
    {
      std::lock_guard<std::mutex> held(log_lock);
      last_sync() = why;
    }
    if (Py_IsInitialized() && PyGILState_Check()) lock_ = PyEval_SaveThread();
  }
  ~HostWaits() {
    if (lock_) PyEval_RestoreThread(lock_);
  }
  void* lock_ = nullptr;
};

// -- queues and events ---------------------------------------------------------------------------

struct Marker {
  std::mutex lock;
  std::condition_variable changed;
  bool is_reached = false;
  double at = 0;

  void reach() {
    std::lock_guard<std::mutex> held(lock);
    is_reached = true;
    at = now();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [this] { return is_reached; });
  }
  bool query() {
    std::lock_guard<std::mutex> held(lock);
    return is_reached;
  }
};
using MarkerPtr = std::shared_ptr<Marker>;

struct Task {
  std::string name;  // empty for events, which cost nothing and are not on the timeline
  std::function<void()> run;
};

class Queue {
 public:
  explicit Queue(int64_t id) : id_(id) {
    std::thread([this] { work(); }).detach();
  }
  void push(std::string name, std::function<void()> run) {
    std::lock_guard<std::mutex> held(lock_);
    tasks_.push_back({std::move(name), std::move(run)});
    changed_.notify_all();
  }
  MarkerPtr mark() {
    auto marker = std::make_shared<Marker>();
    push("", [marker] { marker->reach(); });
    return marker;
  }

 private:
  void work() {
    at::AutoDispatchBelowADInplaceOrView below;
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> held(lock_);
        changed_.wait(held, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      const double begun = now();
      if (!task.name.empty()) std::this_thread::sleep_for(std::chrono::microseconds(kernel_us.load()));
      try {
        task.run();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> held(log_lock);
        if (first_error().empty()) first_error() = task.name + ": " + error.what();
      }
      task.run = nullptr;
      if (!task.name.empty()) {
        std::lock_guard<std::mutex> held(log_lock);
        timeline().push_back({id_, task.name, begun, now()});
      }
    }
  }

  int64_t id_;
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
};

constexpr int kQueues = 8;
std::atomic<int> next_queue{1};
thread_local int64_t current_queue = 0;

// Queues live as long as the process, because their threads do. The first is the default one.
Queue& queue(int64_t id) {
  static auto* all = [] {
    auto* made = new std::vector<Queue*>();
    for (int i = 0; i < kQueues; ++i) made->push_back(new Queue(i));
    return made;
  }();
  return *all->at(id);
}

void wait_for_queue(int64_t id, const char* why) {
  auto marker = queue(id).mark();
  HostWaits waits(why);
  marker->wait();
}

// -- memory --------------------------------------------------------------------------------------

using Memory = std::shared_ptr<void>;

void drop(void* memory) { delete static_cast<Memory*>(memory); }

// Kernels under way keep memory that the host has let go of.
struct SimAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n_bytes) override {
    if (n_bytes == 0) return {nullptr, nullptr, &drop, c10::Device(kSim, 0)};
    auto* memory = new Memory(std::malloc(n_bytes), std::free);
    std::memset(memory->get(), 0x7f, n_bytes);  // whoever reads before a kernel has written sees nonsense
    return {memory->get(), memory, &drop, c10::Device(kSim, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* target, const void* source, size_t n_bytes) const override {
    std::memcpy(target, source, n_bytes);
  }
};
SimAllocator allocator;
REGISTER_ALLOCATOR(kSim, &allocator);

// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto* memory = static_cast<Memory*>(storage.data_ptr().get_context());
  c10::DataPtr data(
      storage.mutable_data(), memory ? new Memory(*memory) : nullptr, &drop, c10::Device(c10::DeviceType::CPU));
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

bool is_sim(const at::Tensor& tensor) { return tensor.device().type() == kSim; }

// -- kernels -------------------------------------------------------------------------------------

template <class F>
c10::IValue mapped(const c10::IValue& value, const F& change, c10::Device device) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor> each : value.toOptionalTensorList())
      changed.push_back(each && each->defined() ? std::make_optional(change(*each)) : std::nullopt);
    return changed;
  }
  return value.isDevice() ? c10::IValue(device) : value;
}

// A number of Python's that became a tensor takes its dtype from the others.
at::Tensor with_promotion_of(const at::Tensor& number, at::Tensor tensor) {
  if (number.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

at::Tensor for_kernel(const at::Tensor& tensor) {
  if (is_sim(tensor)) return on_cpu(tensor);
  TORCH_CHECK(tensor.dim() == 0, "a tensor of the CPU was given to a kernel of the sim device");
  return with_promotion_of(tensor, tensor.clone());
}

at::Tensor for_shape(const at::Tensor& tensor) {
  return with_promotion_of(
      tensor, at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type())));
}

// Which argument each result is, if the operator writes to that argument; -1 for a new tensor.
std::vector<int> written_arguments(const c10::FunctionSchema& schema) {
  std::vector<int> found;
  for (const auto& result : schema.returns()) {
    found.push_back(-1);
    if (!result.alias_info()) continue;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto* theirs = schema.arguments()[i].alias_info();
      if (theirs && theirs->beforeSets() == result.alias_info()->beforeSets()) found.back() = int(i);
    }
  }
  return found;
}

// An `out` argument may come empty: the operator then gives it its shape.
bool gives_shape_to_out(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& args) {
  for (size_t i = 0; i < args.size(); ++i)
    if (schema.arguments()[i].is_out() && args[i].isTensor() && args[i].toTensor().numel() == 0) return true;
  return false;
}

bool has_tensors_only(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const bool is_tensor = result.type()->kind() == c10::TypeKind::TensorType;
    const bool is_list_in_place = result.alias_info() && result.type()->kind() == c10::TypeKind::ListType;
    if (!is_tensor && !is_list_in_place) return false;
  }
  return true;
}

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (!has_tensors_only(schema)) {
    // The host is told a number, so it has to wait.
    wait_for_queue(current_queue, schema.name().c_str());
    at::native::cpu_fallback(op, stack);
    return;
  }
  const size_t n_args = schema.arguments().size();
  std::vector<c10::IValue> args(stack->end() - n_args, stack->end());
  const auto written = written_arguments(schema);
  std::vector<c10::IValue> results;
  auto made = std::make_shared<std::vector<at::Tensor>>();
  if (std::count(written.begin(), written.end(), -1) || gives_shape_to_out(schema, args)) {
    torch::jit::Stack shapes;
    for (const auto& arg : args) shapes.push_back(mapped(arg, for_shape, c10::Device(c10::DeviceType::Meta)));
    op.callBoxed(&shapes);
    for (size_t i = 0; i < written.size(); ++i) {
      if (written[i] >= 0) {
        const at::Tensor target = args[written[i]].toTensor();
        if (const auto sizes = shapes[i].toTensor().sizes(); target.sizes() != sizes) target.resize_(sizes);
        results.push_back(target);
        made->emplace_back();
      } else if (const at::Tensor shape = shapes[i].toTensor(); shape.defined()) {
        at::Tensor result(at::detail::empty_strided_generic(
            shape.sizes(), shape.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
            shape.scalar_type()));
        made->push_back(on_cpu(result));
        results.emplace_back(result);
      } else {
        made->emplace_back();
        results.emplace_back(at::Tensor());
      }
    }
  } else {
    for (int index : written) results.push_back(args[index]);
  }
  auto given = std::make_shared<torch::jit::Stack>();
  for (const auto& arg : args) given->push_back(mapped(arg, for_kernel, c10::Device(c10::DeviceType::CPU)));
  queue(current_queue).push(schema.name(), [op, given, made] {
    op.callBoxed(given.get());
    for (size_t i = 0; i < made->size(); ++i) {
      // What the CPU leaves empty, such as statistics that nobody will need, has room all the same.
      if ((*made)[i].defined() && (*given)[i].toTensor().numel()) (*made)[i].copy_((*given)[i].toTensor());
    }
  });
  torch::jit::drop(*stack, n_args);
  for (auto& result : results) stack->push_back(std::move(result));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::Tensor(at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                              c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::Tensor(at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}

void resize_storage(const c10::Storage& storage, size_t n_bytes) {
  auto fresh = allocator.allocate(n_bytes);
  const size_t kept = std::min<size_t>(n_bytes, storage.nbytes());
  if (kept) {
    auto target = *static_cast<Memory*>(fresh.get_context());
    auto source = *static_cast<Memory*>(storage.data_ptr().get_context());
    queue(current_queue).push("resize", [=] { std::memcpy(target.get(), source.get(), kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(n_bytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t n_bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (n_bytes > self.storage().nbytes()) resize_storage(self.storage(), n_bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

// A copy between the host and the device makes the host wait, unless it is asked not to.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (self.numel() == 0) return target;
  const bool to_sim = is_sim(target);
  at::Tensor source = is_sim(self) ? on_cpu(self) : self.clone();
  at::Tensor end = to_sim ? on_cpu(target) : target;
  const char* name = is_sim(self) ? (to_sim ? "copy" : "copy to host") : "copy to device";
  if (end.sizes() != source.sizes()) source = source.expand(end.sizes());
  queue(current_queue).push(name, [source, end]() mutable { end.copy_(source); });
  if (!(is_sim(self) && to_sim) && !non_blocking) {
    wait_for_queue(current_queue, name);
    check_device();
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar number_of(const at::Tensor& self) {
  wait_for_queue(current_queue, "item");
  check_device();
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY(sim, m) { m.def("on_cpu(Tensor tensor) -> Tensor"); }

TORCH_LIBRARY_IMPL(sim, PrivateUse1, m) { m.impl("on_cpu", &on_cpu); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &number_of);
  m.impl("record_stream", &record_stream);
}

// -- what torch asks of a device -----------------------------------------------------------------

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(kSim, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, 0), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_queue); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getNewStream(getDevice(), 0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(1 + next_queue++ % (kQueues - 1)); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_queue);
    current_queue = next.id();
    return before;
  }
  void record(void** event, const c10::Stream& where, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkerPtr();
    *static_cast<MarkerPtr*>(*event) = queue(where.id()).mark();
  }
  void block(void* event, const c10::Stream& where) const override {
    if (!event) return;
    auto marker = *static_cast<MarkerPtr*>(event);
    queue(where.id()).push("", [marker] { marker->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || (*static_cast<MarkerPtr*>(event))->query(); }
  void synchronizeEvent(void* event) const override {
    HostWaits waits("event");
    if (event) (*static_cast<MarkerPtr*>(event))->wait();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<MarkerPtr*>(event);
  }
  bool queryStream(const c10::Stream& where) const override {
    auto marker = queue(where.id()).mark();
    return marker->query();
  }
  void synchronizeStream(const c10::Stream& where) const override { wait_for_queue(where.id(), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int id = 0; id < kQueues; ++id) wait_for_queue(id, "device");
    check_device();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return 1e3 * ((*static_cast<MarkerPtr*>(end))->at - (*static_cast<MarkerPtr*>(begin))->at);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kSim, 0); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n_bytes) const override {
    resize_storage(storage, n_bytes);
  }
};

struct Register {
  Register() { at::RegisterPrivateUse1HooksInterface(new SimHooks()); }
} registered;

}  // namespace

// -- for Python, by ctypes -----------------------------------------------------------------------

extern "C" {

int64_t sim_host_syncs() { return host_syncs; }

const char* sim_last_sync() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> held(log_lock);
  text = last_sync();
  return text.c_str();
}

// How long each kernel takes at least.
void sim_set_kernel_us(int64_t us) { kernel_us = us; }

// Have a queue call a function of Python, which must not raise.
void sim_call(int64_t id, const char* name, void (*function)(int64_t), int64_t argument) {
  queue(id).push(name, [=] { function(argument); });
}

// Have a queue do nothing for so long.
void sim_delay(int64_t id, int64_t us) {
  queue(id).push("delay", [=] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
}

int64_t sim_count_ran() {
  std::lock_guard<std::mutex> held(log_lock);
  return int64_t(timeline().size());
}

int64_t sim_ran(int64_t number, char* name, int64_t size, double* begun, double* ended) {
  std::lock_guard<std::mutex> held(log_lock);
  const Ran& ran = timeline().at(number);
  std::snprintf(name, size, "%s", ran.name.c_str());
  *begun = ran.begun;
  *ended = ran.ended;
  return ran.queue;
}
}
