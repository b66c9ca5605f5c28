//! A kernel's parameters as one struct, whose fields have the names, types and offsets that the kernel declares.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

use tch::Tensor;

/// A struct with a twin in a file of `kernels/`, or all parameters of a kernel in their order. [`kernel_params!`]
/// declares it.
///
/// # Safety
/// The type is `repr(C)`, and `FIELDS` are all of its fields in their order, each with its offset and size in bytes.
pub unsafe trait DeviceStruct: Copy {
    /// The struct's name in CUDA C++, or the kernel's.
    const NAME: &'static str;
    const FIELDS: &'static [Field];

    /// A pointer to each field, valid while `self` is borrowed.
    fn pointers(&self) -> Vec<*mut c_void> {
        let start = std::ptr::from_ref(self).cast::<u8>();
        Self::FIELDS.iter().map(|field| start.wrapping_add(field.offset).cast_mut().cast()).collect()
    }
}

/// One field of a [`DeviceStruct`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    pub name: &'static str,
    /// From the start of the struct, in bytes.
    pub offset: usize,
    pub bytes: usize,
    /// The type in CUDA C++, of an array that of an element; `void *` stands for a pointer of any type.
    pub c_type: &'static str,
    /// Elements of an array.
    pub length: Option<usize>,
}

/// What a field may be, by its name in CUDA C++.
pub trait FieldType {
    const C_TYPE: &'static str;
    const LENGTH: Option<usize> = None;
}

/// The address of a tensor's first element. It borrows the tensor, so that a launch's parameters cannot outlive the
/// memory that they point to:
///
/// ```compile_fail
/// use cs336::cuda::Address;
/// use tch::{Device, Kind, Tensor};
/// let address = Address::of(&Tensor::zeros([3], (Kind::Float, Device::Cpu)));
/// println!("{address:?}");
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Address<'a> {
    address: u64,
    tensor: PhantomData<&'a ()>,
}

impl<'a> Address<'a> {
    pub const NULL: Self = Self { address: 0, tensor: PhantomData };

    /// An address whose memory the caller keeps until the kernel has run.
    pub fn from_raw(address: u64) -> Self {
        Self { address, tensor: PhantomData }
    }

    pub fn of(tensor: &'a Tensor) -> Self {
        Self { address: tensor.data_ptr() as u64, tensor: PhantomData }
    }
}

impl fmt::Debug for Address<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address)
    }
}

macro_rules! field_types {
    ($($type:ty = $name:literal),* $(,)?) => {
        $(impl FieldType for $type {
            const C_TYPE: &'static str = $name;
        })*
    };
}
field_types!(
    i32 = "int",
    u32 = "unsigned",
    i64 = "long long",
    u64 = "unsigned long long",
    f32 = "float",
    f64 = "double"
);

impl FieldType for Address<'_> {
    const C_TYPE: &'static str = "void *";
}

impl<T: FieldType, const LENGTH: usize> FieldType for [T; LENGTH] {
    const C_TYPE: &'static str = T::C_TYPE;
    const LENGTH: Option<usize> = Some(LENGTH);
}

/// Declares a [`DeviceStruct`]: `struct Rust as "its name in kernels/" { field: Type, a, b: Type, .. }`, where fields of one
/// type that follow each other may share it.
macro_rules! kernel_params {
    ($(
        $(#[$meta:meta])*
        struct $name:ident $(<$lifetime:lifetime>)? as $c_name:literal { $($($field:ident),+: $type:ty),+ $(,)? }
    )+) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub struct $name $(<$lifetime>)? {
            $($(pub $field: $type,)+)+
        }

        // SAFETY: `repr(C)`, and the list is made of the same fields as the struct.
        unsafe impl $(<$lifetime>)? $crate::cuda::DeviceStruct for $name $(<$lifetime>)? {
            const NAME: &'static str = $c_name;
            const FIELDS: &'static [$crate::cuda::Field] = &[$($($crate::cuda::Field {
                name: stringify!($field),
                offset: std::mem::offset_of!($name, $field),
                bytes: size_of::<$type>(),
                c_type: <$type as $crate::cuda::FieldType>::C_TYPE,
                length: <$type as $crate::cuda::FieldType>::LENGTH,
            },)+)+];
        }

        impl $(<$lifetime>)? $crate::cuda::FieldType for $name $(<$lifetime>)? {
            const C_TYPE: &'static str = $c_name;
        }
    )+};
}
pub(crate) use kernel_params;

#[cfg(test)]
pub(crate) mod layout;

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    kernel_params! {
        /// A struct inside.
        struct Inner as "Inner" { count: i32, values: [f64; 2] }
        /// A kernel.
        struct Probe<'a> as "probe" { scale: f32, x, y: Address<'a>, inner: Inner, n: u32 }
    }

    #[test]
    fn fields_carry_their_names_offsets_and_types() {
        let fields: Vec<_> = Probe::FIELDS.iter().map(|f| (f.name, f.offset, f.bytes, f.c_type, f.length)).collect();
        let expected = [
            ("scale", 0, 4, "float", None),
            ("x", 8, 8, "void *", None),
            ("y", 16, 8, "void *", None),
            ("inner", 24, 24, "Inner", None),
            ("n", 48, 4, "unsigned", None),
        ];
        assert_eq!((fields, Probe::NAME), (expected.to_vec(), "probe"));
        assert_eq!((Inner::FIELDS[1].c_type, Inner::FIELDS[1].length), ("double", Some(2)));
    }

    #[test]
    fn an_address_is_that_of_the_first_element_of_a_view() {
        let tensor = Tensor::zeros([3], (Kind::Float, Device::Cpu));
        let view = tensor.narrow(0, 1, 2);
        assert_eq!(Address::of(&view).address, tensor.data_ptr() as u64 + 4);
        assert_eq!(format!("{:?}", Address::NULL), "0x0");
    }
}
