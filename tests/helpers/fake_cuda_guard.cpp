// The part of a CUDA build that autograd asks for before it works on CUDA tensors: which device is current, which
// stream, how many devices there are. Here: one GPU that does nothing, with streams that are numbers, one of them the
// current one of a thread, as in CUDA. See fake_cuda.py.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device the_gpu(c10::DeviceType::CUDA, 0);

thread_local c10::StreamId current_stream = 0;

c10::Stream the_stream() {
  return c10::Stream(c10::Stream::UNSAFE, the_gpu, current_stream);
}

struct IdleGuard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  // The base class has no index for its device, and refuses events and queries of streams.
  c10::Device exchangeDevice(c10::Device) const override { return the_gpu; }
  c10::Device getDevice() const override { return the_gpu; }
  c10::Stream getStream(c10::Device) const noexcept override { return the_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return the_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const c10::Stream before = the_stream();
    current_stream = stream.id();
    return before;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

}  // namespace

// For Python, by ctypes.
extern "C" int64_t fake_cuda_stream() { return current_stream; }
extern "C" void set_fake_cuda_stream(int64_t stream) { current_stream = stream; }

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, ::IdleGuard)
}

namespace at {

// PyTorch asks for a class of this very name.
struct CUDAHooks final : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
